"""The whole orchestrator on stages that only sleep, against the model of the step time.

python -m tests.bench.real.sleeping --out FILE.json [--rounds 3] [--most 1]

Generation, judge and update each take as long as they are told, so that the model has to be right to within what the
orchestrator itself costs. Arms: ``two-N`` with generation and training, ``three-N`` with a judge as well, N the
bound. The prediction is that of the report on the synchronous arm.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from nightshift.wire.experience import unpack_samples
from tests.bench.real import jobs
from tests.bench.real.record import Record, table
from tests.bench.real.same_split import predicted
from tests.fakes.run import FakeRun
from tests.fakes.scorers import FakeScorers
from tests.fakes.trainer import FakeTrainer

_TOKENS = 4
_GROUPS, _SAMPLES = 4, 2


class SleepingTrainer(FakeTrainer):
    """A trainer whose updates take so many seconds, and each part of one its share."""

    seconds = 0.0

    async def Update(self, request: Any, context: Any) -> Any:
        """An update, late; the answer says how long it took."""
        began = time.time()
        await asyncio.sleep(self.seconds * len(unpack_samples(request.samples)) / (_GROUPS * _SAMPLES))
        answer = await super().Update(request, context)
        answer.seconds = time.time() - began
        return answer


class SleepingScorers(FakeScorers):
    """Scorers that answer after so many seconds."""

    seconds = 0.0

    async def Score(self, request: Any, context: Any) -> Any:
        """A score, late."""
        await asyncio.sleep(self.seconds)
        return await super().Score(request, context)


async def run(arguments: argparse.Namespace, folder: Path, arm: str) -> Path:
    """One job in this process; returns its folder.

    Raises:
        RuntimeError: it failed.
    """
    kind, _, bound = arm.partition("-")
    steps = arguments.steps
    run = FakeRun(
        folder,
        prompts=64,
        token_s=arguments.seconds / _TOKENS,
        pipeline={"max_staleness": int(bound), "streaming": bound != "0"},
        rollout={"batch_size": _GROUPS, "n": _SAMPLES, "max_response_length": _TOKENS, "request_timeout_s": 60.0},
        trainer={"total_steps": steps, "learning_rate": 0.1, "test_freq": 0, "update_timeout_s": 60.0},
        scorers={"batch_wait_ms": 1.0, "timeout_s": 60.0},
        algorithm={"kl_coef": 0},
        checkpoint={"export": False},
    )
    run.engine.script = lambda request: [7, 8, 9, 10]
    trainer, scorers = SleepingTrainer(run.trainer.store), SleepingScorers()
    trainer.seconds = arguments.seconds
    scorers.seconds = arguments.seconds if kind == "three" else 0.0
    run.trainer, run.scorers = trainer, scorers
    async with run:
        code = await run.run(limit_s=arguments.timeout)
    if code:
        raise RuntimeError(f"exit {code}: {run.error()}")
    return run.run_dir


def measure(arguments: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run of an arm."""
    with tempfile.TemporaryDirectory() as folder:
        return jobs.figures(asyncio.run(run(arguments, Path(folder), arm)), arguments.warm)


def show(record: Record, arms: list[str]) -> str:
    """The table."""
    rows = []
    for arm in arms:
        kind, _, bound = arm.partition("-")
        sync, runs = f"{kind}-0", record.of(arm)
        if not runs or not record.of(sync):
            continue
        measured = record.median(arm, "seconds_per_step") or 0.0
        expected = predicted(record.of(sync), int(bound)) or 0.0
        ratios = record.ratios(sync, arm, "seconds_per_step")
        rows.append(
            (
                kind,
                bound,
                [run["seconds_per_step"] for run in runs],
                statistics.median(ratios),
                expected,
                f"{100 * (expected / measured - 1):+.1f} %",
            )
        )
    return table(("stages", "max_staleness", "s a step, each run", "sync / this", "predicted", "off"), rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=["two-0", "two-1", "two-2", "three-0", "three-1", "three-2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each stage")
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        help="those after the warm-up: a multiple of 6, so that each bound has whole turns",
    )
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=330.0)
    arguments = parser.parse_args()
    record = Record(arguments.out)
    record.go(arguments.arms, arguments.rounds, arguments.most, lambda arm, _: measure(arguments, arm))
    print(show(record, arguments.arms))


if __name__ == "__main__":
    main()
