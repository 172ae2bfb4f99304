"""What a step is made again from: stored samples, the advantages that follow from them, and what counts as equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.algorithms import compute_advantages
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import Sample
from nightshift.wire.schedule import StepRecord
from orchestrator.runner.rollouts import write_rollouts
from services.trainer.config import RankConfig
from services.trainer.replay import CriticResult, Replayed, StepResult, inexact
from services.trainer.stored_samples import advantage_difference, read_samples
from tests.fixtures.samples import make_sample

GAE = AlgorithmConfig(estimator="gae", kl_coef=0.0, gae_lambda=0.9, bootstrap_truncated=True)


def valued(count: int = 4) -> list[Sample]:
    """Samples of two groups with values; the last response was cut."""
    rng = np.random.default_rng(3)
    samples = []
    for at in range(count):
        sample = make_sample(f"g{at // 2}.{at % 2}", mask=[1] * (at + 2), reward=float(at))
        sample.group_id, sample.values = f"g{at // 2}", rng.normal(size=at + 2).astype(np.float32)
        samples.append(sample)
    samples[-1].finish_reason, samples[-1].bootstrap_value = "length", 0.75
    compute_advantages(
        samples, GAE, values=[s.values for s in samples], bootstraps=[s.bootstrap_value for s in samples]
    )
    return samples


def record(samples: list[Sample]) -> StepRecord:
    return StepRecord(
        step=1,
        expect="run/0/0",
        version="run/0/1",
        attempt=0,
        parts=[["g0"], ["g1"]],
        versions={},
        left_out=[],
        learning_rate=1e-3,
        loss={},
        algorithm=GAE.model_dump(mode="json"),
        stepped=True,
        digest="",
        time=0.0,
    )


def store(folder: Path, samples: list[Sample]) -> None:
    """As the orchestrator stores them."""
    rows: list[dict[str, Any]] = [
        {
            **{name: getattr(sample, name) for name in Sample.__slots__ if name not in ("versions", "reward_parts")},
            "versions": [span.version for span in sample.versions],
            "version_starts": [span.start for span in sample.versions],
        }
        for sample in samples
    ]
    write_rollouts(folder / "rollouts", 1, rows)


def test_values_returns_and_the_bootstrap_come_back_to_the_bit(tmp_path: Path) -> None:
    samples = valued()
    store(tmp_path, samples)
    found = read_samples(tmp_path, record(samples))
    assert list(found) == ["g0", "g1"]
    for sample, again in zip(samples, [*found["g0"], *found["g1"]], strict=True):
        for name in ("values", "returns", "advantages", "logprobs", "response_ids"):
            assert getattr(again, name).tobytes() == getattr(sample, name).tobytes()
        assert again.bootstrap_value == sample.bootstrap_value
    assert advantage_difference(found["g1"], GAE) == 0.0


@pytest.mark.parametrize("name", ["advantages", "returns", "values", "reward", "bootstrap_value"])
def test_a_change_of_any_of_them_is_found(name: str) -> None:
    last = valued()[-1]
    old = getattr(last, name)
    changed = replace(last, **{name: old + (0.5 if isinstance(old, float) else np.float32(0.5))})
    assert advantage_difference([changed], GAE) > 0.05


def test_an_older_run_without_values_says_so(tmp_path: Path) -> None:
    samples = [replace(sample, values=None, returns=None) for sample in valued()]
    store(tmp_path, samples)
    found = read_samples(tmp_path, record(samples))
    with pytest.raises(BadInputError, match="values"):
        advantage_difference(found["g0"], GAE)


def test_equal_means_that_neither_policy_nor_critic_differs() -> None:
    step = StepResult(1, "a", "a", True, 0.0, critic=CriticResult("b", "b", True))
    good = Replayed(0, [step], weight_difference=0.0, critic_weight_difference=0.0)
    assert good.equal
    assert Replayed(0, [StepResult(1, "", "a", None)]).equal
    assert not replace(good, critic_weight_difference=1e-9).equal
    assert not replace(good, weight_difference=1e-9).equal
    for other in ({"critic": CriticResult("b", "c", False)}, {"same": False}, {"advantage_difference": 1e-7}):
        assert not replace(good, steps=[replace(step, **other)]).equal


def test_only_a_gpu_without_deterministic_mode_may_give_other_bits() -> None:
    assert inexact(RankConfig("model")) == ""
    assert inexact(RankConfig("model", device="cuda")) == ""
    assert "pipeline.deterministic" in inexact(RankConfig("model", device="cuda", deterministic=False))
