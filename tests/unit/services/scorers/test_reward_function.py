import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.errors import BadInputError
from services.scorers.reward_function import ARGUMENTS, Judgement, RewardFunction, judge, split_reference

SAMPLE = {
    "id": "g.0",
    "prompt": "2+2?",
    "response": "4",
    "response_ids": np.array([4], dtype=np.int32),
    "ground_truth": "4",
    "data_source": "sums",
    "extra_info": {"level": 1},
    "finish_reason": "stop",
}


def load(tmp_path: Path, source: str, name: str = "score") -> RewardFunction:
    path = tmp_path / "reward.py"
    path.write_text(source)
    return RewardFunction(path, name, source)


@pytest.mark.parametrize(
    ("value", "score"),
    [(1, 1.0), (True, 1.0), (0.5, 0.5), (np.float32(0.25), 0.25), (np.bool_(False), 0.0), (Fraction(1, 4), 0.25)],
)
def test_o36_numbers_are_scores(value, score):
    judgement = judge(value, "f")
    assert (judgement.score, judgement.error_type, judgement.error) == (score, "", "")
    assert type(judgement.score) is float


class OneValue:
    """What a tensor of one value and no dimension looks like, on whatever device."""

    shape, dtype, device = (), "bfloat16", "cuda:1"

    def tolist(self) -> float:
        return 0.25


def test_o36_a_tensor_of_one_value_is_a_score_and_is_said_once(tmp_path, caplog):
    assert judge(OneValue(), "f").score == 0.25
    assert judge({"score": np.array(0.5), "acc": OneValue()}, "f") == Judgement(0.5, {"acc": 0.25})
    source = f"from {__name__} import OneValue\ndef score(response):\n    return OneValue()\n"
    function = load(tmp_path, source)
    assert [function({"response": "a"}).score, function({"response": "b"}).score] == [0.25, 0.25]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "[reward] function score returned a OneValue of bfloat16 on cuda:1: its values are taken as floats"


def test_o36_a_map_with_score_keeps_its_other_numbers():
    judgement = judge({"score": 1, "acc": 0, "note": "fine", "loss": math.nan}, "f")
    assert judgement.score == 1.0
    assert judgement.parts == {"acc": 0.0}


@pytest.mark.parametrize("value", ["0.7", [1], b"1", 1j, {"acc": 1}, {"score": "1"}, object(), np.array([1.0])])
def test_o36_other_types_are_errors_that_name_function_and_value(value):
    judgement = judge(value, "my_reward")
    assert (judgement.score, judgement.error_type) == (None, "type")
    assert "my_reward" in judgement.error
    assert "expected a float" in judgement.error or "without 'score'" in judgement.error


def test_o36_a_text_is_not_parsed():
    assert judge("0.7", "my_reward").error == (
        "function my_reward returned '0.7' (str): expected a float, an int, a bool, or a map with 'score'"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, {"score": math.nan}])
def test_o36_values_that_are_not_finite_are_invalid(value):
    judgement = judge(value, "f")
    assert (judgement.score, judgement.error_type) == (None, "not_finite")


@pytest.mark.parametrize("value", [None, {"score": None, "acc": 1}])
def test_o36_none_is_unscored(value):
    judgement = judge(value, "f")
    assert (judgement.score, judgement.error_type) == (None, "none")


@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers()),
        st.dictionaries(st.one_of(st.just("score"), st.text()), st.one_of(st.none(), st.floats(), st.text())),
    )
)  # fmt: skip
def test_a_judgement_is_a_finite_score_or_a_named_error(value):
    judgement = judge(value, "f")
    assert (judgement.score is None) == (judgement.error_type != "")
    assert (judgement.error == "") == (judgement.error_type == "")
    assert judgement.score is None or math.isfinite(judgement.score)
    assert all(math.isfinite(part) for part in judgement.parts.values())


def test_only_the_arguments_of_the_signature_are_passed(tmp_path):
    function = load(
        tmp_path, "def score(response, ground_truth, scale=2.0):\n    return scale * (response == ground_truth)"
    )
    assert function(SAMPLE).score == 2.0


def test_a_function_with_kwargs_gets_every_argument(tmp_path):
    function = load(tmp_path, "def score(**kwargs):\n    return {'score': 1, **{k: 1 for k in kwargs}}")
    assert set(function(SAMPLE).parts) == set(ARGUMENTS)


def test_an_async_function_is_awaited_on_one_loop(tmp_path):
    source = (
        "import asyncio\nloops = set()\n"
        "async def score(response):\n    loops.add(asyncio.get_running_loop())\n    await asyncio.sleep(0)\n"
        "    return len(loops)"
    )
    function = load(tmp_path, source)
    assert [function(SAMPLE).score, function(SAMPLE).score] == [1.0, 1.0]


def test_o35_an_exception_comes_back_from_the_users_first_frame_on(tmp_path):
    source = (
        "import json\ndef score(response):\n    return helper(response)\ndef helper(text):\n    return json.loads('{')"
    )
    judgement = load(tmp_path, source)(SAMPLE)
    assert (judgement.score, judgement.error_type) == (None, "raised")
    lines = judgement.error.splitlines()
    assert lines[1].strip() == f'File "{tmp_path}/reward.py", line 3, in score'
    assert lines[-1].startswith("json.decoder.JSONDecodeError")
    assert "reward_function.py" not in judgement.error


@pytest.mark.parametrize("statement", ["raise SystemExit(3)", "raise KeyboardInterrupt", "import sys; sys.exit(0)"])
def test_o35_leaving_is_an_exception_like_any_other(tmp_path, statement):
    judgement = load(tmp_path, f"def score(response):\n    {statement}")(SAMPLE)
    assert (judgement.score, judgement.error_type) == (None, "raised")


def test_a_message_that_no_text_encoding_holds_is_escaped(tmp_path):
    judgement = load(tmp_path, "def score(response):\n    raise ValueError('\\ud800')")(SAMPLE)
    judgement.error.encode()
    assert "\\ud800" in judgement.error


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        ("import nothing_of_this_name", "score", "cannot be imported: ModuleNotFoundError"),
        ("def score(response:\n", "score", "SyntaxError"),
        ("1 / 0", "score", "ZeroDivisionError: division by zero (line 1)"),
        ("import sys; sys.exit(1)", "score", "SystemExit"),
        ("def scores(response): ...", "score", "has no function 'score'"),
        ("score = 3", "score", "is a int, not a function"),
        ("def score(solution): ...", "score", "asks for 'solution', which is not known"),
        ("def score(response, /): ...", "score", "asks for 'response', which is positional only"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(tmp_path, source, name, words):
    with pytest.raises(BadInputError) as caught:
        load(tmp_path, source, name)
    assert words in caught.value.message
    assert str(tmp_path / "reward.py") in caught.value.message
    assert caught.value.role == "reward"
    assert caught.value.fix
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["reward.py", ":score", "reward.py:", "reward.py:a b", "missing.py:score"])
def test_a_reference_that_names_no_function_in_a_file_is_refused(reference):
    with pytest.raises(BadInputError, match=r"reward"):
        split_reference(reference)


def test_modules_beside_the_file_and_dataclasses_work(tmp_path):
    (tmp_path / "beside_the_reward.py").write_text("VALUE = 0.5")
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom beside_the_reward import VALUE\n"
        "@dataclass\nclass Result:\n    value: float\n"
        "def score(response):\n    return Result(VALUE).value"
    )
    assert load(tmp_path, source)(SAMPLE).score == 0.5
