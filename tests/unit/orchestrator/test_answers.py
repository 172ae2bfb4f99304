"""Reading the answers of rollout servers (cases O-29, O-31, O-33)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.experience import VersionSpan
from orchestrator.runner.answers import EngineAwayError, InvalidAnswerError, parse_generated, parse_prompt_logprobs
from orchestrator.runner.reply import Reply, object_of

ID = "run.g0000001.0.0"


def answer(tokens: list[int], values: list[Any], **changes: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": "stop",
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": t, "logprob": v} for t, v in zip(tokens, values, strict=True)]},
        "weight_versions": [{"version": "run/0/3", "start": 0, "end": len(tokens)}] if tokens else [],
    }
    return {"request_id": f"generate-tokens-{ID}", "choices": [choice | changes]}


def test_o29_ids_and_log_probs_are_taken_as_they_are() -> None:
    generated = parse_generated(answer([4, 5, 2], [-0.5, -1.0, 0.0]), ID)
    assert generated.response_ids.tolist() == [4, 5, 2]
    assert generated.response_ids.dtype == np.int32
    assert generated.logprobs.tolist() == [-0.5, -1.0, 0.0]
    assert generated.logprobs.dtype == np.float32
    assert generated.versions == [VersionSpan("run/0/3", 0, 3)]
    assert generated.finish_reason == "stop"


def test_the_id_may_come_without_its_prefix() -> None:
    assert parse_generated(answer([4], [-1.0]) | {"request_id": ID}, ID).response_ids.tolist() == [4]


def test_rounding_above_zero_is_brought_to_zero() -> None:
    assert parse_generated(answer([4], [1e-6]), ID).logprobs.tolist() == [0.0]


def test_o34_an_empty_response_is_valid() -> None:
    generated = parse_generated(answer([], []), ID)
    assert len(generated.response_ids) == len(generated.logprobs) == 0
    assert generated.versions == []


@pytest.mark.parametrize("value", [None, 0.3, math.nan, -math.inf, "-0.5", -1e300, -(10**400), 10**400])
def test_o31_a_broken_log_prob_is_refused(value: Any) -> None:
    with pytest.raises(InvalidAnswerError, match="log-prob") as caught:
        parse_generated(answer([4, 5], [-0.5, value]), ID)
    assert caught.value.kind == "logprobs"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"logprobs": {"content": [{"token_id": 4, "logprob": -1.0}]}}, "logprobs"),
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": {"content": [{"token_id": 9, "logprob": -1.0}] * 2}}, "logprobs"),
        ({"token_ids": [4, -5]}, "token_ids"),
        ({"token_ids": [4, 5.0]}, "token_ids"),
        ({"token_ids": [4, 1 << 31]}, "token_ids"),
        ({"token_ids": [4, 10**400]}, "token_ids"),
        ({"weight_versions": []}, "versions"),
        ({"weight_versions": None}, "versions"),
        ({"weight_versions": [{"version": "v", "start": 0, "end": 1}]}, "versions"),
        ({"weight_versions": [{"version": "v", "start": 1, "end": 2}]}, "versions"),
        ({"weight_versions": [{"version": "v", "start": 0}]}, "form"),
        ({"weight_versions": [{"version": "v", "start": 0, "end": math.inf}]}, "form"),
        ({"weight_versions": 7}, "form"),
        ({"finish_reason": "error"}, "finish_reason"),
        ({"finish_reason": None}, "finish_reason"),
    ],
)
def test_malformed_choices_are_refused_by_kind(changes: dict[str, Any], kind: str) -> None:
    with pytest.raises(InvalidAnswerError) as caught:
        parse_generated(answer([4, 5], [-0.5, -0.5], **changes), ID)
    assert caught.value.kind == kind
    assert caught.value.role == "rollout"


def test_no_more_tokens_are_taken_than_were_asked_for() -> None:
    assert len(parse_generated(answer([4, 5], [-0.5, -0.5]), ID, 2).response_ids) == 2
    with pytest.raises(InvalidAnswerError, match="2 tokens, and 1 were asked for") as caught:
        parse_generated(answer([4, 5], [-0.5, -0.5]), ID, 1)
    assert caught.value.kind == "length"


@pytest.mark.parametrize("request_id", ["generate-tokens-run.g0000001.0.1", "", None, 7])
def test_o29_the_answer_to_another_attempt_is_refused(request_id: Any) -> None:
    with pytest.raises(InvalidAnswerError, match="asked for") as caught:
        parse_generated(answer([4], [-1.0]) | {"request_id": request_id}, ID)
    assert caught.value.kind == "request_id"


@pytest.mark.parametrize("choices", [[], None, [1, 2], "ab"])
def test_one_sample_has_one_choice(choices: Any) -> None:
    with pytest.raises(InvalidAnswerError) as caught:
        parse_generated(answer([4], [-1.0]) | {"choices": choices}, ID)
    assert caught.value.kind == "choices"


def test_an_aborted_request_may_be_made_again() -> None:
    with pytest.raises(EngineAwayError, match="was aborted"):
        parse_generated(answer([4], [-1.0], finish_reason="abort"), ID)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([1 << 31, 1 << 63, -(10**400), 10**400])
    | st.floats()
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["logprob", "token_id", "end"]), inner),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "token_ids": json_values,
            "logprobs": json_values | st.fixed_dictionaries({"content": json_values}),
            "weight_versions": json_values,
            "finish_reason": json_values | st.just("stop"),
        },
    )
)
def test_no_answer_breaks_the_reader(changes: dict[str, Any]) -> None:
    try:
        generated = parse_generated(answer([4, 5], [-0.5, -0.5], **changes), ID)
    except (InvalidAnswerError, EngineAwayError):
        return
    assert len(generated.response_ids) == len(generated.logprobs)
    assert (np.isfinite(generated.logprobs) & (generated.logprobs <= 0)).all()
    assert not len(generated.response_ids) or generated.versions[-1].end == len(generated.response_ids)


def scored(*values: Any) -> list[Any]:
    return [None, *({str(token): {"logprob": value}} for token, value in enumerate(values, 5))]


def test_log_probs_of_a_prompt_are_those_of_its_ids() -> None:
    values = parse_prompt_logprobs(scored(-0.5, -2, -1e300), [4, 5, 6, 7], 1)
    assert values.dtype == np.float32
    assert values.tolist() == [-0.5, -2.0, -math.inf]


@pytest.mark.parametrize(
    "rows",
    [
        scored(-0.5),
        7,
        {"0": 1},
        "four",
        scored(-0.5, None, -1.0),
        scored(-0.5, "much", -1.0),
        scored(-0.5, -(10**400), -1.0),
        scored(-0.5, [-1.0], -1.0),
        [None, [], [], []],
        [None, {"5": -1.0}, {"6": 3}, {"7": {}}],
    ],
)
def test_o29_a_prompt_s_log_probs_of_another_form_are_an_invalid_answer(rows: Any) -> None:
    with pytest.raises(InvalidAnswerError):
        parse_prompt_logprobs(rows, [4, 5, 6, 7], 1)


@pytest.mark.parametrize("body", [b"no JSON", b"[" * 200_000, b"\xff\xfe", b"{"])
def test_an_answer_that_is_no_json_is_that_of_a_server_that_is_away(body: bytes) -> None:
    with pytest.raises(EngineAwayError, match="JSON"):
        object_of(Reply(200, body), "rollout-0", "/info")
