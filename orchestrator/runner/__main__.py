"""``python -m orchestrator.runner --run-dir DIR --otlp-port P [--resume]``: one process, one job."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import signal
import sys
from pathlib import Path

import uvloop

from nightshift.cli.runs import RUNNER_LOCK, hold
from nightshift.wire import logs
from nightshift.wire.errors import NightshiftError
from orchestrator.runner.files import raise_limit
from orchestrator.runner.job import Job

_PR_SET_PDEATHSIG = 1
#: For which the runner of a command that was killed may finish what it is at.
_PATIENCE_S = 10.0
#: New objects between two collections, and collections between two of the older generations. A run holds tens of
#: thousands of objects for each thousand responses in flight, nearly all of which are freed without the collector: at
#: Python's own 700 it looked at them for a tenth of the run's CPU.
_COLLECT = (50_000, 20, 50)


def main() -> int:
    """Runs the job of a folder; the exit code is that of the command line."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.runner")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--otlp-port", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    context = logs.setup("orchestrator", arguments.run_dir.resolve().name)
    # Nothing outlives a command that was killed: the parent's death ends this process as Ctrl-C does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    raise_limit()
    gc.freeze()  # what was imported stays
    gc.set_threshold(*_COLLECT)
    folder = arguments.run_dir.resolve()
    try:
        with hold(folder, RUNNER_LOCK, _PATIENCE_S):
            job = Job(folder, arguments.otlp_port)
            job.events.listeners.append(context.on_event)
            # libuv's loop takes less CPU for an event than asyncio's own.
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_run(job, arguments.resume))
    except NightshiftError as error:
        print(error, file=sys.stderr)
        return error.exit_code


async def _run(job: Job, resume: bool) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, job.stop)
    return await job.run(resume=resume)


if __name__ == "__main__":
    sys.exit(main())
