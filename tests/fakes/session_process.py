"""Plays ``nightshift run JOB --resume FOLDER --json``: the real runner, between fake services in this process.

With a fleet, its rollout servers are processes of their own, and are lent to it; a job on pairs has none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

from nightshift.config.load import read_resolved
from orchestrator.runner import watcher
from orchestrator.runner.job import Job
from tests.fakes.engine import FakeEngine
from tests.fakes.run import FakeRun
from tests.fakes.scorers import FakeScorers
from tests.fakes.trainer import AnsweringTrainer


async def run(folder: Path) -> int:
    """Runs the job of a folder to its end."""
    with tempfile.TemporaryDirectory(prefix="ns-fake-") as store:
        fake: FakeRun = object.__new__(FakeRun)  # on a folder and a job that are there already
        fake.run_dir, fake.spec = folder, read_resolved(folder / "job.yaml")
        lent = fake.spec.rollout.fleet is not None  # the servers are those of the service's fleet
        watcher._LOOK_S = 0.05 if lent else watcher._LOOK_S  # leases of the tests are short
        alone = lent or fake.spec.algorithm.is_preference  # a job on pairs samples nothing
        fake.engines = [] if alone else [FakeEngine(Path(store), "rollout-0", token_s=0.001, logs=folder / "logs")]
        fake.scorers, fake.trainer, fake.reference_url = FakeScorers(), AnsweringTrainer(Path(store)), ""
        async with fake:
            job = Job(folder, 0)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, job.stop)
            return await job.run(resume=True)


if __name__ == "__main__":
    os.environ["NIGHTSHIFT_RUN_ID"] = Path(sys.argv[1]).name
    sys.exit(asyncio.run(run(Path(sys.argv[1]))))
