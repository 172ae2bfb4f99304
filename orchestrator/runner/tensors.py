"""What debug mode records: role, name, shapes, dtype and device of what crosses each boundary of the pipeline. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nightshift.wire.experience import Sample

#: Arrays of a sample -> the role that made them, in the order in which they come about.
_MADE_BY = {
    "prompt_ids": "data",
    "response_ids": "rollout",
    "logprobs": "rollout",
    "loss_mask": "rollout",
    "ref_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "values": "critic",
    "returns": "advantages",
    "advantages": "advantages",
}


def tensors_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What the samples of a part carry, one map for each array and kind of it.

    Returns:
        Maps of role, name, dtype, device and ``shapes``: how many samples have which shape, by the shape as text. They
        lie in the host's memory, which numpy calls "cpu".
    """
    found: list[dict[str, Any]] = []
    for name, role in _MADE_BY.items():
        arrays = [value for sample in samples if (value := getattr(sample, name)) is not None]
        for dtype in sorted({str(array.dtype) for array in arrays}):
            shapes = Counter(str(list(array.shape)) for array in arrays if str(array.dtype) == dtype)
            found.append({"role": role, "name": name, "dtype": dtype, "device": "cpu", "shapes": dict(shapes)})
    rewards = np.array([sample.reward for sample in samples if sample.reward is not None])
    if len(rewards):
        scalars = {"[]": len(rewards)}
        found.append(
            {"role": "reward", "name": "reward", "dtype": str(rewards.dtype), "device": "cpu", "shapes": scalars}
        )
    return found


def tensors_told(role: str, results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a scorer said of the tensors in its model; one that says nothing, or something else, is passed over."""
    told = [item for result in results for item in result.get("tensors") or () if isinstance(item, Mapping)]
    return [{**item, "role": role} for item in told if {"name", "shape", "dtype", "device"} <= item.keys()]


def tensors_inside(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a trainer or a scorer said of its own, in the same form."""
    return [
        {**{key: item[key] for key in ("role", "name", "dtype", "device")}, "shapes": {str(item["shape"]): 1}}
        for item in told
    ]
