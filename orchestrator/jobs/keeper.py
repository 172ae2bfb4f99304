"""``python -m orchestrator.jobs.keeper RUN_DIR TOKEN COMMAND...``: runs a job's command, and says how it ended."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from nightshift.cli import processes
from orchestrator.jobs.process import EXIT, PROCESS, identity, write

_SWEEP_S = 30.0
_POLL_S = 0.1


def main(arguments: list[str]) -> int:
    """Runs the command to its end; SIGINT and SIGTERM go on to it as SIGINT, which leaves a checkpoint."""
    run_dir, token, command = Path(arguments[0]), int(arguments[1]), arguments[2:]
    asked = 0

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    processes.adopt_orphans()
    write(run_dir / PROCESS, asdict(identity(token)))
    child = processes.start("job", command, environment=os.environ, stdout=sys.stdout.fileno(), stderr=2)
    told = 0
    while (code := child.poll()) is None:
        if told < asked:
            told += 1
            child.signal(signal.SIGINT)
        child.wait(_POLL_S)
    child.kill_group()
    if code < 0:
        # It could not clean up after itself; nothing of a run may outlive it.
        for line in processes.sweep(run_dir.name, _SWEEP_S):
            print(f"killed a process that the job left behind: {line}", file=sys.stderr, flush=True)
    write(run_dir / EXIT, {"code": code, "token": token})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
