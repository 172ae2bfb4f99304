"""``python -m tests.sim.serve FOLDER SCALE SETTINGS``: simulated services in a process of their own.

Writes ``services.json`` into the run's folder, and ``sim.json`` with what the services saw when it is told to end.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from tests.sim.run import Scale, SimRun


def seen(run: SimRun, began: float) -> dict[str, Any]:
    """What the services saw, in simulated seconds."""
    trainer, now = run.sim_trainer, run.clock.now()
    for engine in run.sims:
        engine.model.advance(now)
    return {
        "ages": dict(trainer.ages),
        "applied": trainer.applied,
        "update_tokens": trainer.tokens,
        "samples": trainer.samples,
        "twice": trainer.twice,
        "trainer_busy_s": trainer.busy_s,
        "engines": {
            "seconds": now - began,
            "tokens": sum(engine.model.tokens for engine in run.sims),
            "preemptions": sum(engine.model.preemptions for engine in run.sims),
            "recomputed": sum(engine.model.recomputed for engine in run.sims),
            "occupied_s": sum(engine.model.occupied_s for engine in run.sims),
            "frozen_s": sum(engine.model.frozen_s for engine in run.sims),
            "gaps": sorted(gap for engine in run.sims for gap in engine.gaps),
        },
        "cpu_s": time.process_time(),
    }


def widen_files() -> int:
    """Raises the soft limit of open files to the hard one; the limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


async def serve(folder: Path, scale: Scale, settings: dict[str, Any]) -> None:
    """Serves until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    run = SimRun(folder, scale, **settings)
    async with run:
        began = run.clock.now()
        await stop.wait()
        (folder / "sim.json").write_text(json.dumps(seen(run, began)))


def main() -> None:
    """The command."""
    widen_files()
    folder, scale, settings = sys.argv[1:4]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(folder), Scale.of(scale), json.loads(settings)))


if __name__ == "__main__":
    main()
