"""What a sample's rewards add up to (cases O-35, O-36), and the seeds of samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.errors import NightshiftError, WireError
from orchestrator.runner.group import combine_rewards, group_id, sample_seed
from orchestrator.runner.scorer import require_ids
from tests.fixtures.samples import make_sample


def scored(score: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "g0.0", "score": score, "parts": {}, "error_type": "", "error": "", "seconds": 0.1, **fields}


def test_rewards_are_summed_by_weight() -> None:
    sample = make_sample()
    combine_rewards(sample, ["a", "b"], [1.0, 0.5], [scored(1, parts={"acc": 1}), scored(0.5, seconds=0.3)])
    assert sample.reward == 1.25
    assert sample.reward_parts == {"a/acc": 1.0, "a": 1.0, "b": 0.5}
    assert sample.reward_seconds == 0.3


def test_a_single_reward_may_have_no_name() -> None:
    sample = make_sample()
    combine_rewards(sample, [None], [1.0], [scored(1.0)])  # type: ignore[list-item]  # as services.json may have it
    assert sample.reward == 1.0


def test_o36_parts_of_a_single_reward_keep_their_names() -> None:
    sample = make_sample()
    combine_rewards(sample, ["a"], [1.0], [scored(1, parts={"acc": 0})])
    assert (sample.reward, sample.reward_parts) == (1.0, {"acc": 0.0})


def test_o36_one_missing_score_leaves_the_sample_unscored() -> None:
    sample = make_sample(reward=0.7)
    missing = scored(None, error_type="timeout", error="took longer than 1 s")
    combine_rewards(sample, ["a", "b"], [1.0, 1.0], [scored(1.0), missing])
    assert sample.reward is None
    assert sample.reward_error == "timeout: took longer than 1 s"


@pytest.mark.parametrize("score", [math.nan, math.inf, "0.7", True, [1], 1e39, -(10**400)])
def test_o36_a_score_that_is_no_finite_number_is_an_error_with_its_value(score: Any) -> None:
    with pytest.raises(NightshiftError) as caught:
        combine_rewards(make_sample(), ["accuracy"], [1.0], [scored(score)])
    assert f"accuracy answered {repr(score)[:80]} for g0.0: expected a finite float" in str(caught.value)
    assert caught.value.role == "reward"


@pytest.mark.parametrize(
    "fields",
    [
        {"parts": 7},
        {"parts": ["a"]},
        {"parts": {"a": math.nan}},
        {"parts": {"a": "0.5"}},
        {"parts": {"a": None}},
        {"parts": {"a": 10**400}},
        {"seconds": "0.1"},
        {"seconds": None},
        {"seconds": -math.inf},
    ],
)
def test_a_result_of_another_form_is_an_error_with_its_value(fields: dict[str, Any]) -> None:
    with pytest.raises(NightshiftError, match=r"accuracy answered .* for g0\.0: expected"):
        combine_rewards(make_sample(), ["accuracy"], [1.0], [scored(0.5, **fields)])


def test_a_sum_that_no_float_holds_is_no_reward() -> None:
    sample = make_sample(reward=None)
    with pytest.raises(NightshiftError, match="expected a finite float"):
        combine_rewards(sample, ["a", "b"], [10.0, 1.0], [scored(3e38), scored(0.0)])
    assert sample.reward is None


SAMPLE = {"id": "g0.0", "response_ids": [4, 5, 6]}


@pytest.mark.parametrize(
    "result",
    [
        {"logprobs": [-1.0, -1.0]},
        {"logprobs": [-1.0, -1.0, math.nan]},
        {"logprobs": [-1.0, None, -1.0]},
        {"logprobs": [[-1.0], [-1.0], [-1.0]]},
        {"logprobs": [[-1.0], [-1.0, -2.0], -1.0]},
        {"logprobs": [-1.0, -1e39, -1.0]},
        {"logprobs": [-1, -(10**400), -1]},
        {"logprobs": 7},
        {"logprobs": [-1.0, 0.3, -1.0]},
        {},
        {"logprobs": [-1.0] * 3, "token_ids": [4, 5, 7]},
        {"logprobs": [-1.0] * 3, "token_ids": [4, 5]},
        {"logprobs": [-1.0] * 3, "token_ids": 4},
        {"logprobs": [-1.0] * 3, "token_ids": [[], 5, 6]},
    ],
)
def test_reference_results_must_fit_the_sampled_tokens(result: dict[str, Any]) -> None:
    with pytest.raises(WireError) as caught:
        require_ids(result, SAMPLE, "reference")
    assert caught.value.role == "reference"


def test_reference_results_that_fit_pass() -> None:
    require_ids({"logprobs": [-1.0] * 3}, SAMPLE, "reference")
    require_ids({"logprobs": [-1.0] * 3, "token_ids": [4, 5, 6]}, SAMPLE, "reference")
    require_ids({"logprobs": [-1.0, 0.0, 1e-6]}, SAMPLE, "teacher")
    require_ids({"logprobs": [-1.0, 7.5, 0.0]}, SAMPLE, "critic")


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 64))
def test_seeds_depend_on_run_group_and_slot_alone(seed: int, index: int, slot: int) -> None:
    value = sample_seed(seed, index, slot)
    assert value == sample_seed(seed, index, slot)
    assert 0 <= value < 2**31
    assert len({value, sample_seed(seed + 1, index, slot), sample_seed(seed, index, slot + 1)}) == 3


@given(st.integers(0, 10**7 - 2))
def test_group_ids_sort_in_the_order_of_issue(index: int) -> None:
    assert group_id(index) < group_id(index + 1)
