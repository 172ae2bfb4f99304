"""A job on preference pairs against fakes: no server, no rewards, the same trainer, checkpoints and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.config import JobSpec
from nightshift.config.load import write_resolved
from tests.fakes import policy
from tests.fakes.run import FakeRun
from tests.fakes.trainer import AnsweringTrainer, FakeTrainer
from tests.fixtures.rows import write_parquet


class PairRun(FakeRun):
    """A run over six pairs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings = {
            "algorithm": {"policy_loss": "dpo", "kl_coef": 0.0},
            "rewards": [],
            "rollout": {"batch_size": 2, "max_response_length": 8},
            "trainer": {"total_steps": 5, "learning_rate": 0.5, "test_freq": 2},
            **settings,
        }
        super().__init__(folder, prompts=6, test_prompts=3, **settings)
        for name, count in (("train", 6), ("test", 3)):
            rows = [{"prompt": f"word {at}?", "chosen": str(at), "rejected": "x"} for at in range(count)]
            write_parquet(folder / f"{name}.parquet", rows)

    def _trainer(self, store: Path) -> FakeTrainer:
        return AnsweringTrainer(store)


async def test_pairs_are_trained_in_turn_with_log_probs_of_the_reference(tmp_path: Path) -> None:
    async with PairRun(tmp_path) as run:
        assert await run.run() == 0, run.error()
        assert run.samples() == []  # no server was asked
        assert len(run.updates) == 5
        for update in run.updates:
            assert (update.loss.policy_loss, update.loss.aggregation) == ("dpo", "seq_mean_token_sum")
            assert update.loss.options == {"beta": 0.1}
            assert len(update.samples) == 4
            for chosen, rejected in zip(update.samples[::2], update.samples[1::2], strict=True):
                assert chosen.group_id == rejected.group_id
                assert np.array_equal(chosen.prompt_ids, rejected.prompt_ids)
            for sample in update.samples:
                expected = policy.score(policy.base_bias(), sample.prompt_ids, sample.response_ids)
                assert sample.ref_logprobs == pytest.approx(expected, abs=1e-6)
        evaluations = [event["metrics"] for event in run.events("evaluation")]
        assert [metrics["eval/prompts"] for metrics in evaluations] == [3.0] * 4  # before, 2, 4 and at the end
        assert evaluations[0]["eval/margin"] == pytest.approx(0.0, abs=1e-6)
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
        assert run.manifest(5)["policy_version"] == f"{run.run_dir.name}/0/5"


async def test_a_resumed_job_goes_on_with_the_next_pairs(tmp_path: Path) -> None:
    def prompts(run: FakeRun) -> list[list[list[int]]]:
        return [[sample.prompt_ids.tolist() for sample in update.samples] for update in run.updates]

    (tmp_path / "whole").mkdir()
    async with PairRun(tmp_path / "whole") as run:
        assert await run.run() == 0, run.error()
        whole, weights = prompts(run), run.trainer.weights
    (tmp_path / "broken").mkdir()
    settings = {"total_steps": 5, "learning_rate": 0.5, "test_freq": 2, "save_freq": 2}
    async with PairRun(tmp_path / "broken", trainer=settings) as run:
        run.trainer.faults.plan("internal", "Update", skip=3, times=None)
        assert await run.run() == 1
        run.trainer.faults.clear()
        assert await run.run(resume=True) == 0, run.error()
        assert prompts(run) == [*whole[:3], *whole[2:]]  # step 3 was not committed and is made again
        np.testing.assert_array_equal(run.trainer.weights, weights)


async def test_a_job_that_is_resumed_with_larger_batches_leaves_no_pair_out(tmp_path: Path) -> None:
    settings = {"total_steps": 5, "learning_rate": 0.5, "test_freq": 0, "save_freq": 1}
    async with PairRun(tmp_path, trainer=settings) as run:
        run.trainer.faults.plan("internal", "Update", skip=1, times=None)
        assert await run.run() == 1
        run.trainer.faults.clear()
        values = run.spec.model_dump(mode="json")
        values["rollout"]["batch_size"] = 4
        write_resolved(JobSpec.model_validate(values), run.run_dir / "job.yaml")
        assert await run.run(resume=True) == 0, run.error()
        first = [sample.prompt_ids.tolist() for update in run.updates[:2] for sample in update.samples[::2]]
        assert len(first) == len({tuple(ids) for ids in first}) == 6  # one epoch: each of the six pairs once
