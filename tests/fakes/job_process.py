"""Plays ``nightshift run JOB --resume FOLDER --json`` for tests of the job service: steps, checkpoints, signals.

Its job file says what it does: ``trainer.total_steps`` steps of ``rollout.request_timeout_s`` seconds each;
``algorithm.gamma`` below 0.5 makes it fail after its first step. A file ``hold`` in the service's data folder holds all
its jobs at the step that it names (:func:`held`), so that a test acts at a known step on any machine. It takes the
place of the services and the runner alone; the ledger is written through the real store, with its fence.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy.exc import OperationalError

from nightshift.cli.runs import hold
from nightshift.config.load import read_resolved
from nightshift.wire.events import EventLog
from nightshift.wire.version import Lineage
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.store.state import RunState, StateStore

TRACE = "a" * 31
#: Spans of each step: name, role, and from when to when, in tenths of it.
SPANS = [
    ("group", "orchestrator", 0, 10),
    ("generate", "rollout", 0, 6),
    ("generate", "rollout", 0, 4),
    ("reward", "reward", 6, 7),
    ("optimizer_step", "trainer", 7, 9),
]
#: Its times by metric, in tenths of it.
TIMES = {"step": 10, "gen": 6, "reward": 1, "adv": 0, "update_actor": 2, "publish": 0, "sync": 0, "push": 0, "wait": 0}


def written(work: Callable[[], Any]) -> Any:
    """Waits for a database that is away, as a runner does."""
    while True:
        try:
            return work()
        except OperationalError:
            time.sleep(0.2)


def held(data_dir: Path, step: int, asked: bool) -> bool:
    """Whether a job that has made ``step`` steps waits: at the step in the file ``hold``, until the file goes or until
    the job is asked to end; "3 firmly" holds it then too."""
    try:
        at, *firmly = (data_dir / "hold").read_text().split()
    except FileNotFoundError:
        return False
    return step >= int(at) and (bool(firmly) or not asked)


def main() -> int:
    """Runs to the end; the exit code of the command line."""
    folder = Path(sys.argv[1])
    os.environ["NIGHTSHIFT_RUN_ID"] = folder.name
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    spec = read_resolved(folder / "job.yaml")
    url = os.environ.get("NIGHTSHIFT_DATABASE_URL") or f"sqlite:///{folder / 'state.db'}"
    store = written(lambda: StateStore(url))
    checkpoints = folder / "checkpoints" / "actor"
    done = sorted(int(path.name.rpartition("_")[2]) for path in checkpoints.glob("global_step_*"))
    step, steps = (done[-1] if done else 0), spec.trainer.total_steps or 3
    with hold(folder), EventLog(folder / "events.jsonl", folder.name) as events:
        with (folder / "starts.txt").open("a") as starts:
            starts.write(f"{os.getpid()} {step} {os.environ.get('NIGHTSHIFT_FENCE')} {os.environ.get('TRACEPARENT')}\n")
        written(lambda: store.save_run(RunState(Lineage(folder.name), TRACE + "0", "running")))
        events.append("job", state="running", steps=steps, step=step)
        while step < steps and not asked:
            time.sleep(spec.rollout.request_timeout_s)
            while held(folder.parents[1], step, bool(asked)):
                time.sleep(0.02)
            if spec.algorithm.gamma < 0.5:
                events.append("job", state="failed", error="[reward] it went wrong. Mend it", role="reward")
                return 1
            step += 1
            trace = f"{TRACE}{step % 10}"
            group = GroupRecord(index=step - 1, row=0, epoch=0, trace_id=trace, state=GroupState.TRAINED, step=step)
            written(partial(store.save_groups, folder.name, [group]))
            now, tenth = time.time(), spec.rollout.request_timeout_s / 10
            for at, (name, role, begin, end) in enumerate(SPANS):
                parent = f"{step:08x}{0:08x}" if at else None
                span = {"name": name, "trace_id": trace, "span_id": f"{step:08x}{at:08x}", "parent_id": parent}
                times = {"start": now - (10 - begin) * tenth, "end": now - (10 - end) * tenth}
                events.append("span", **span, **times, role=role, links=[], attributes={"rl.step": step})
            metrics = {"reward/mean": step / steps, "loss/actor": -0.1 * step}
            metrics |= {f"timing/{name}": tenths * tenth for name, tenths in TIMES.items()}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "kind": "train", "time": time.time(), "metrics": metrics}) + "\n")
            rows = [
                {
                    "step": step, "group_id": f"g{step}", "sample_id": f"g{step}.{at}", "row_id": "0", "epoch": 0,
                    "trace_id": trace, "prompt_text": f"question {step}", "response_text": f"answer {at}",
                    "reward": step + at / 10, "finish_reason": "stop", "prompt_tokens": 3, "response_tokens": 4 + at,
                    "versions": [f"{folder.name}/1/{step - 1}"], "version_starts": [0],
                }
                for at in range(4)
            ]  # fmt: skip
            pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / f"step_{step:06d}.parquet")
            events.append("step", step=step, steps=steps, metrics=metrics)
        target = checkpoints / f"global_step_{step}"
        if not target.exists():
            part = checkpoints / f".part-{step}"
            part.mkdir(parents=True, exist_ok=True)
            (part / "config.json").write_text(json.dumps({"step": step}))
            (part / "model.safetensors").write_bytes(b"w" * 1500)
            written(partial(store.check_fence, folder.name))
            part.rename(target)
        finished = step >= steps
        events.append("job", state="succeeded" if finished else "interrupted")
        return 0 if finished else 130


if __name__ == "__main__":
    sys.exit(main())
