"""What debug mode says of a part: one line for each array and kind of it, with the shapes that it comes in."""

from __future__ import annotations

import numpy as np

from nightshift.wire.experience import Sample
from orchestrator.runner.tensors import tensors_inside, tensors_of


def sample(length: int, dtype: str = "float32", reward: float | None = 1.0) -> Sample:
    return Sample(
        sample_id="g.0", group_id="g", trace_id="0" * 32, prompt_ids=np.zeros(3, np.int32),
        response_ids=np.zeros(length, np.int32), logprobs=np.zeros(length, dtype), loss_mask=np.ones(length, np.uint8),
        versions=[], finish_reason="stop", reward=reward,
    )  # fmt: skip


def test_each_array_with_its_role_kind_and_shapes() -> None:
    found = tensors_of([sample(4), sample(5), sample(4, reward=None), sample(4, "float64")])
    by_name = {(item["role"], item["name"], item["dtype"]): item["shapes"] for item in found}
    assert by_name["data", "prompt_ids", "int32"] == {"[3]": 4}
    assert by_name["rollout", "response_ids", "int32"] == {"[4]": 3, "[5]": 1}
    assert by_name["rollout", "logprobs", "float32"] == {"[4]": 2, "[5]": 1}
    assert by_name["rollout", "logprobs", "float64"] == {"[4]": 1}, "an odd one is seen"
    assert by_name["reward", "reward", "float64"] == {"[]": 3}
    assert not any(name == "ref_logprobs" for _, name, _ in by_name), "what is not there is not named"
    assert {item["device"] for item in found} == {"cpu"}


def test_nothing_to_learn_from_is_nothing_to_tell() -> None:
    assert tensors_of([]) == []
    assert tensors_inside([]) == []


def test_a_trainers_own_in_the_same_form() -> None:
    told = {"role": "trainer", "name": "logprobs", "shape": [2, 8], "dtype": "float32", "device": "cuda:0"}
    assert tensors_inside([told]) == [
        {"role": "trainer", "name": "logprobs", "dtype": "float32", "device": "cuda:0", "shapes": {"[2, 8]": 1}}
    ]
