"""Samples and loss specifications on the wire."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire import codec
from nightshift.wire.errors import WireError
from nightshift.wire.experience import (
    FINISH_LENGTH,
    FINISH_STOP,
    LossSpec,
    Sample,
    VersionSpan,
    pack_loss,
    pack_samples,
    unpack_loss,
    unpack_samples,
)
from tests.fixtures.samples import make_sample


def _same(left: Sample, right: Sample) -> bool:
    for item in fields(Sample):
        one, other = getattr(left, item.name), getattr(right, item.name)
        if isinstance(one, np.ndarray):
            if not (isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)):
                return False
        elif one != other:
            return False
    return True


@st.composite
def _samples(draw: st.DrawFn) -> Sample:
    tokens = draw(st.integers(0, 6))
    cut = draw(st.integers(0, tokens))
    floats = st.floats(-50, 0, width=32)
    sample = make_sample(
        f"run-1/{draw(st.integers(0, 9))}.{draw(st.integers(0, 3))}",
        mask=draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens)),
        logprobs=draw(st.lists(floats, min_size=tokens, max_size=tokens)),
        reward=draw(st.none() | st.floats(-5, 5)),
        finish_reason=draw(st.sampled_from([FINISH_STOP, FINISH_LENGTH])),
        reward_parts=draw(st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-1, 1))),
        response_text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
    )
    sample.versions = [VersionSpan("run/0/1", 0, cut), VersionSpan("run/0/2", cut, tokens)]
    if draw(st.booleans()):
        sample.ref_logprobs = sample.logprobs - np.float32(0.25)
        sample.advantages = np.ones(tokens, np.float32)
    return sample


@given(st.lists(_samples(), max_size=4))
def test_samples_come_back(samples: list[Sample]) -> None:
    back = unpack_samples(pack_samples(samples))
    assert len(back) == len(samples)
    assert all(_same(one, other) for one, other in zip(samples, back, strict=True))


def test_o33_trained_tokens_and_truncation_follow_mask_and_finish_reason() -> None:
    ended = make_sample(tokens=3)
    cut = make_sample(tokens=6, finish_reason=FINISH_LENGTH)
    assert [ended.trained_tokens, cut.trained_tokens] == [3, 6]
    assert [ended.truncated, cut.truncated] == [False, True]


def test_o31_a_log_prob_of_zero_is_valid_and_a_positive_or_missing_one_is_not() -> None:
    make_sample(logprobs=[0.0, -1.0]).check()
    for bad in ([0.3, -1.0], [float("nan"), -1.0], [float("-inf"), -1.0]):
        with pytest.raises(WireError, match="log-prob"):
            make_sample(logprobs=bad).check()
    with pytest.raises(WireError, match="logprobs"):
        replace(make_sample(tokens=3), logprobs=np.zeros(2, np.float32)).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_ids", np.zeros((2, 2), np.int32)),
        ("prompt_ids", [1, 2]),
        ("prompt_ids", None),
        ("response_ids", np.zeros(3, np.float32)),
        ("response_ids", None),
        ("logprobs", [0.0, 0.0, 0.0]),
        ("logprobs", None),
        ("loss_mask", np.full(3, 2, np.uint8)),
        ("loss_mask", np.ones(4, np.uint8)),
        ("ref_logprobs", np.zeros(4, np.float32)),
        ("ref_logprobs", np.full(3, np.nan, np.float32)),
        ("advantages", np.full(3, np.inf, np.float32)),
        ("advantages", np.zeros(3, np.int64)),
        ("reward", "0.7"),
        ("reward", True),
        ("finish_reason", "eos"),
        ("finish_reason", None),
        ("group_id", 3),
        ("response_text", b"x"),
        ("versions", []),
        ("versions", [["v", 0, 2]]),
        ("versions", [["v", 0, 1], ["v", 2, 3]]),
        ("versions", [["v", 0, 2], ["v", 1, 3]]),
        ("versions", [["v", "0", "3"]]),
        ("versions", [["v", 0, 1.5]]),
        ("versions", [["v", 0]]),
        ("versions", [3]),
        ("versions", None),
        ("versions", [[5, 0, 3]]),
    ],
    ids=str,
)
def test_a_malformed_field_is_a_wire_error(name: str, value: Any) -> None:
    values = codec.unpack(pack_samples([make_sample(tokens=3)]))[0]
    values[name] = value
    with pytest.raises(WireError):
        unpack_samples(codec.pack([values]))


@pytest.mark.parametrize("message", [3, {"a": 1}, [3], [None], [[1, 2]], ["text"], [{}], [{1: 2}]], ids=str)
def test_what_is_not_a_list_of_samples_is_a_wire_error(message: Any) -> None:
    with pytest.raises(WireError):
        unpack_samples(codec.pack(message))


def test_an_unknown_or_missing_field_is_a_wire_error() -> None:
    values = codec.unpack(pack_samples([make_sample()]))[0]
    with pytest.raises(WireError, match="surprise"):
        unpack_samples(codec.pack([{**values, "surprise": 1}]))
    del values["logprobs"]
    with pytest.raises(WireError, match="logprobs"):
        unpack_samples(codec.pack([values]))


_FIELDS = st.sampled_from([item.name for item in fields(Sample)])
_VALUES = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=3) | st.floats()


@given(_FIELDS, _VALUES)
def test_any_value_in_any_field_decodes_or_is_a_wire_error(name: str, value: Any) -> None:
    values = codec.unpack(pack_samples([make_sample()]))[0]
    values[name] = value
    with contextlib.suppress(WireError):
        message = codec.pack([values])
        unpack_samples(message)


def test_a_loss_specification_comes_back() -> None:
    spec = LossSpec(policy_loss="ppo_clip", kl_coef=0.05, total_tokens=12, options={"c": 3.0})
    assert unpack_loss(pack_loss(spec)) == spec
    assert unpack_loss(codec.pack({**asdict(spec), "kl_coef": 1})).kl_coef == 1


@pytest.mark.parametrize(
    "message",
    [
        None,
        [1],
        {"unknown": 1},
        {1: 2},
        {"total_tokens": "12"},
        {"total_tokens": 1.5},
        {"kl_coef": True},
        {"kl_coef": None},
        {"policy_loss": 3},
        {"options": [1]},
    ],
    ids=str,
)
def test_a_malformed_loss_specification_is_a_wire_error(message: Any) -> None:
    with pytest.raises(WireError):
        unpack_loss(codec.pack(message))
