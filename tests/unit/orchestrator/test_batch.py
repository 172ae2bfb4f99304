"""From groups to what the trainer gets: budget, denominators, metrics and stored rows."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.trace import INVALID_SPAN

from nightshift.config.algorithm import AlgorithmConfig
from nightshift.data import Prompt
from nightshift.wire.errors import RoleError
from nightshift.wire.experience import FINISH_LENGTH, Sample, VersionSpan
from orchestrator.runner.batch import batch_metrics, check_budget, loss_spec, rollout_rows, trainable
from orchestrator.runner.group import Group
from tests.fixtures.samples import make_sample


def make_group(index: int, samples: list[Sample], failures: list[str] | None = None) -> Group:
    prompt = Prompt(f"rows.parquet:{index}", [{"role": "user", "content": "hi"}], np.array([1, 5]), "2", "sums", None)
    return Group(index, prompt, 0, "a" * 32, 3, INVALID_SPAN, samples=samples, failures=failures or [])


def unscored(sample_id: str) -> Sample:
    return make_sample(sample_id, reward=None, reward_error="raised: ZeroDivisionError: division by zero")


def test_only_scored_samples_with_a_token_are_trained() -> None:
    samples = [make_sample("g0.0"), unscored("g0.1"), make_sample("g0.2", mask=[]), make_sample("g0.3", mask=[0, 0])]
    assert [sample.sample_id for sample in trainable(samples)] == ["g0.0"]


def test_denominators_are_those_of_the_whole_batch() -> None:
    samples = [make_sample("g0.0", mask=[1, 1, 0]), make_sample("g0.1", mask=[0, 0]), make_sample("g1.0", mask=[1])]
    spec = loss_spec(AlgorithmConfig(kl_coef=0.1, clip_high=0.28), samples, 0.7, 16)
    assert (spec.total_tokens, spec.total_sequences, spec.constant_length) == (3, 2, 16)
    assert (spec.temperature, spec.kl_coef, spec.clip_high) == (0.7, 0.1, 0.28)


def test_a_penalty_in_the_reward_is_no_term_of_the_loss() -> None:
    config = AlgorithmConfig(kl_coef=0.1, kl_in="reward", estimator="reinforce_plus_plus", kl_estimator="k1")
    assert loss_spec(config, [], 1.0, 0).kl_coef == 0.0


def test_o35_the_budget_quotes_the_first_unscored_cause() -> None:
    groups = [
        make_group(0, [make_sample("g0.0"), unscored("g0.1")]),
        make_group(1, [unscored("g1.0"), unscored("g1.1")]),
    ]
    check_budget(groups, 2, 0.75)
    with pytest.raises(
        RoleError, match=r"3 of 4 samples .* the first \(g0\.1\) by raised: ZeroDivisionError"
    ) as caught:
        check_budget(groups, 2, 0.5)
    assert caught.value.role == "reward"


def test_the_budget_counts_samples_that_could_not_be_had() -> None:
    groups = [make_group(0, [make_sample("g0.0")], failures=["log-prob None", "log-prob 0.3"])]
    with pytest.raises(RoleError, match=r"2 of 3 samples of the batch could not be had, .* log-prob None") as caught:
        check_budget(groups, 3, 0.5)
    assert caught.value.role == "rollout"


def test_the_budget_counts_groups_that_failed_whole() -> None:
    groups = [make_group(0, [make_sample("g0.0"), make_sample("g0.1")])]
    failures = [RoleError("was away", role="reference"), RoleError("later", role="reward")]
    check_budget(groups, 2, 0.7, failures)
    with pytest.raises(RoleError, match="2 of 3 prompt groups failed, the first because was away") as caught:
        check_budget(groups, 2, 0.5, failures)
    assert caught.value.role == "reference"


def test_o09_the_mean_reward_is_over_valid_samples() -> None:
    samples = [make_sample("g0.0", reward=1.0), unscored("g0.1"), make_sample("g0.2"), make_sample("g0.3")]
    metrics = batch_metrics([make_group(0, samples)], 3)
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    assert (metrics["reward/valid"], metrics["reward/unscored"]) == (3, 1)


def test_a_batch_without_a_score_has_no_mean() -> None:
    metrics = batch_metrics([make_group(0, [unscored("g0.0")])], 3)
    assert "reward/mean" not in metrics
    assert all(np.isfinite(value) for value in metrics.values())


def test_staleness_counts_from_the_oldest_token() -> None:
    mixed = make_sample("g0.0", tokens=4)
    mixed.versions = [VersionSpan("run/0/2", 0, 1), VersionSpan("run/1/4", 1, 4)]
    fresh = make_sample("g1.0")
    fresh.versions = [VersionSpan("run/1/5", 0, 3)]
    groups = [make_group(0, [mixed]), make_group(1, [fresh])]
    metrics = batch_metrics(groups, 5)
    assert (metrics["staleness/max"], metrics["staleness/min"], metrics["staleness/mean"]) == (3, 0, 1.5)
    assert make_group(2, []).oldest_version == 3  # no token: the weights that the servers held at its start


def test_parts_of_rewards_become_metrics() -> None:
    samples = [make_sample("g0.0", reward_parts={"acc": 1.0}), make_sample("g0.1", reward_parts={"acc": 0.0})]
    metrics = batch_metrics([make_group(0, samples)], 3)
    assert metrics["reward/acc/mean"] == 0.5


def test_o33_the_truncated_share_follows_the_finish_reason() -> None:
    samples = [make_sample("g0.0", finish_reason=FINISH_LENGTH), make_sample("g0.1"), make_sample("g0.2")]
    assert batch_metrics([make_group(0, samples)], 3)["response_length/truncated_share"] == pytest.approx(1 / 3)


def test_stored_rows_lead_from_the_row_to_the_version() -> None:
    sample = make_sample("g0.0", reward=0.5, ref_logprobs=[-1.0, -1.0, -1.0], response_text="ab")
    (row,) = rollout_rows([make_group(0, [sample])], 4, "run/0/3")
    assert (row["step"], row["row_id"], row["sample_id"]) == (4, "rows.parquet:0", "g0.0")
    assert (row["versions"], row["version_starts"]) == (["run/0/0"], [0])
    assert row["prompt_text"] == "user: hi"
    assert row["response_ids"].tolist() == sample.response_ids.tolist()
    assert row["advantages"] is None
    assert (row["values"], row["bootstrap_value"], row["returns"]) == (None, None, None)
