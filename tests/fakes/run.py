"""A run folder with fake services, and the orchestrator's runner on it: in this process, or in one of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow.parquet as pq

from nightshift.config import JobSpec
from nightshift.config.load import write_resolved
from nightshift.wire.events import read_events
from orchestrator.runner.job import Job
from tests.fakes.engine import FakeEngine
from tests.fakes.requests import Request
from tests.fakes.scorers import REFERENCE, FakeScorers
from tests.fakes.trainer import FakeTrainer, Update
from tests.fixtures.rows import write_parquet
from tests.fixtures.tokenizer_k import write_folder

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS: dict[str, Any] = {
    "name": "fake",
    "rewards": [{"function": "unused.py:reward", "name": "wanted"}],
    "data": {"max_prompt_length": 64},
    "algorithm": {"kl_coef": 0.01},
    "rollout": {"batch_size": 2, "n": 2, "max_response_length": 8, "request_timeout_s": 5.0},
    "trainer": {"learning_rate": 2.0, "test_freq": 0, "update_timeout_s": 10.0},
    "scorers": {"batch_wait_ms": 1.0, "timeout_s": 5.0},
    "pipeline": {"role_timeout_s": 10.0},
    "tracking": {"tensorboard": False},
}


def rows(count: int) -> list[dict[str, Any]]:
    """Prompts that differ, in the form of data D."""
    return [
        {
            "prompt": [{"role": "user", "content": f"word {at}?"}],
            "reward_model": {"ground_truth": str(at), "style": "rule"},
            "data_source": "toy",
            "extra_info": {"index": at},
        }
        for at in range(count)
    ]


class FakeRun:
    """A run with its services.

    Args:
        folder: where everything lies.
        prompts: rows for training.
        test_prompts: held-out rows; 0: no evaluation.
        servers: rollout servers.
        token_s: their seconds per token.
        route: whether they have our own route.
        settings: further settings of the job, as ``section={key: value}``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prompts: int = 12,
        test_prompts: int = 0,
        servers: int = 1,
        token_s: float = 0.0,
        run_id: str = "fake-20260101-000000-abcd",
        route: bool = True,
        **settings: Any,
    ) -> None:
        self.run_dir = folder / "runs" / run_id
        self.run_dir.mkdir(parents=True)
        store = folder / "store"
        store.mkdir()
        self.engines: list[FakeEngine] = [
            self._engine(store, f"rollout-{at}", token_s=token_s, route=route) for at in range(servers)
        ]
        self.scorers = self._scorers()
        self.reference_url = ""  # of another reference than that of the fake scorers
        self.trainer = self._trainer(store)
        self.trainer.replaced = self.replace_trainer
        values = {key: dict(value) if isinstance(value, dict) else value for key, value in DEFAULTS.items()}
        for section, value in settings.items():
            values[section] = values.get(section, {}) | value if isinstance(value, dict) else value
        values["model"] = {"path": str(write_folder(folder / "model"))}
        values["data"]["train_files"] = [str(write_parquet(folder / "train.parquet", rows(prompts)))]
        if test_prompts:
            values["data"]["test_files"] = [str(write_parquet(folder / "test.parquet", rows(test_prompts)))]
        self.spec = JobSpec.model_validate(values)
        write_resolved(self.spec, self.run_dir / "job.yaml")

    def _engine(self, store: Path, name: str, *, token_s: float, route: bool) -> FakeEngine:
        return FakeEngine(store, name, token_s=token_s, route=route, logs=self.run_dir / "logs")

    def _scorers(self) -> FakeScorers:
        return FakeScorers()

    def _trainer(self, store: Path) -> FakeTrainer:
        return FakeTrainer(store)

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await engine.start()
        await self.scorers.start()
        await self.trainer.start()
        self.write_services()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for engine in self.engines:
            await engine.stop()
        await self.scorers.stop()
        await self.trainer.stop()

    @property
    def engine(self) -> FakeEngine:
        """The first rollout server."""
        return self.engines[0]

    def checkpoint_folders(self, kind: str) -> list[Path]:
        """Folders of its checkpoints: of "trainer" (resume states), "actor" (exports) or "critic"."""
        return sorted((self.run_dir / "checkpoints" / kind).glob("global_step_*"))

    @property
    def updates(self) -> list[Update]:
        """Updates that the trainer applied, in order."""
        return self.trainer.updates

    def write_services(self) -> None:
        """Writes services.json, as the agent does, in one go."""
        rewards = [
            {"name": reward.name, "url": self.scorers.url, "application": f"reward-{reward.name}"}
            for reward in self.spec.rewards
        ]
        address = self.reference_url or self.scorers.url
        reference = {"url": address, "application": REFERENCE} if self.spec.needs_reference else None
        services = {
            "rollout": [engine.address for engine in self.engines],
            "rewards": rewards,
            "reference": reference,
            "critic": None,
            "lent": {"weight_backend": "safetensors", "init_info": {"root": str(self.trainer.store)}},
            "trainer": {"url": self.trainer.url, "incarnation": str(self.trainer.incarnation)},
        }
        part = self.run_dir / "services.tmp"
        part.write_text(json.dumps(services))
        part.replace(self.run_dir / "services.json")

    async def replace_trainer(self, away_s: float = 0.0) -> None:
        """Kills the trainer and starts another one, as the agent does."""
        await self.trainer.die()
        await asyncio.sleep(away_s)
        await self.trainer.start_again()
        self.write_services()

    async def restart(self, engine: FakeEngine, away_s: float = 0.0) -> None:
        """Kills a server and starts it again, as the agent does."""
        await engine.kill()
        await asyncio.sleep(away_s)
        await engine.start()
        self.write_services()

    # Running ----------------------------------------------------------------------------------------------------------

    async def run(
        self, *, resume: bool = False, watch: Callable[[Job], Any] | None = None, limit_s: float = 180.0
    ) -> int:
        """Runs the job in this process, with the coroutine function ``watch`` beside it; returns the exit code."""
        job = Job(self.run_dir, 0)
        running = asyncio.create_task(job.run(resume=resume))
        watching = asyncio.create_task(watch(job)) if watch is not None else None
        try:
            async with asyncio.timeout(limit_s):
                if watching is not None:
                    await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done():
                        watching.result()
                return await running
        finally:
            for task in (running, watching):
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    async def spawn(self, *, resume: bool = False, **environment: str) -> asyncio.subprocess.Process:
        """Starts the runner as a process of its own."""
        arguments = ["-m", "orchestrator.runner", "--run-dir", str(self.run_dir), *(["--resume"] if resume else [])]
        log = (self.run_dir / "runner.log").open("ab")
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, *arguments, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **environment}
            )
        finally:
            log.close()

    async def until(self, condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> None:
        """Waits for something to be true.

        Raises:
            AssertionError: it was not, in time.
        """
        deadline = asyncio.get_running_loop().time() + limit_s
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, f"waited {limit_s} s for {what}"
            await asyncio.sleep(0.01)

    # What it left -----------------------------------------------------------------------------------------------------

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Events of a kind, or all."""
        return [event for event in read_events(self.run_dir / "events.jsonl") if kind in ("", event["kind"])]

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["kind"] == kind]

    def manifest(self, step: int) -> dict[str, Any]:
        """Manifest of a checkpoint."""
        folder = self.run_dir / "checkpoints" / "trainer" / f"global_step_{step}"
        return dict(json.loads((folder / "manifest.json").read_text()))

    def rollouts(self) -> list[dict[str, Any]]:
        """Stored samples, by step."""
        files = sorted((self.run_dir / "rollouts").glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def error(self) -> str:
        """Why the job failed."""
        return next((e.get("error") or "" for e in reversed(self.events("job")) if e.get("state") == "failed"), "")

    def warnings(self) -> list[str]:
        """Texts of all warnings."""
        return [event["message"] for event in self.events("warning")]

    def rows_by_step(self) -> dict[int, list[str]]:
        """Row ids of each step's groups, in the order of their group ids."""
        steps: dict[int, dict[str, str]] = {}
        for row in self.rollouts():
            steps.setdefault(row["step"], {})[row["group_id"]] = row["row_id"]
        return {step: [groups[name] for name in sorted(groups)] for step, groups in sorted(steps.items())}

    def samples(self) -> list[Request]:
        """Requests for samples on all servers, evaluation left out."""
        return [r for engine in self.engines for r in engine.samples if ".eval" not in r.request_id]
