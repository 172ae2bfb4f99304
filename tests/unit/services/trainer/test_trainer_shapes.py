"""The shapes that stand in the types of the losses, against what the losses take and give."""

from __future__ import annotations

from typing import Any, get_type_hints

import jaxtyping
import pytest
import torch

from nightshift.wire.experience import LossSpec
from services.trainer import losses
from services.trainer.losses import POLICY_LOSSES, LossInputs, LossOutputs, policy_loss

NAMES = {name: getattr(jaxtyping, name) for name in ("Bool", "Float", "Int64", "Shaped")}
INPUTS = get_type_hints(LossInputs, vars(losses), NAMES)
OUTPUTS = get_type_hints(LossOutputs, vars(losses), NAMES)


def wrong(value: Any, types: dict[str, Any]) -> list[str]:
    """Fields whose value has another type or shape than is said; T is bound by the first of them."""
    return [name for name, said in types.items() if name not in ("sums", "sequences") and not fits(value, name, said)]


def fits(value: Any, name: str, said: Any) -> bool:
    return isinstance(getattr(value, name), said)


def inputs(tokens: int, samples: int | None, dtype: torch.dtype) -> LossInputs:
    logprobs = torch.linspace(-2.0, -0.1, tokens, dtype=dtype).requires_grad_()
    behaviour, mask = logprobs.detach() - 0.1, torch.ones(tokens, dtype=torch.bool)
    sequence = None if samples is None else torch.arange(tokens) % samples
    return LossInputs(logprobs, behaviour, torch.ones_like(behaviour), mask, behaviour + 0.05, sequence, samples or 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("samples", [None, 1, 3])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_take_and_give_what_their_types_say(name: str, samples: int | None, dtype: torch.dtype) -> None:
    given = inputs(7, samples, dtype)
    with jaxtyping.jaxtyped("context"):
        assert wrong(given, INPUTS) == []
        outputs = policy_loss(given, LossSpec(policy_loss=name))
        assert wrong(outputs, OUTPUTS) == []  # and of the same T
        sums = get_type_hints(LossInputs.sequence_sum, vars(losses), NAMES)["return"]
        assert isinstance(given.sequence_sum(given.behaviour), sums)
        assert given.sequence_sum(given.behaviour).shape == (() if samples is None else (samples,))
        assert given.per_token(given.sequence_sum(given.behaviour)).shape == (7,)


def test_another_shape_or_type_is_noticed() -> None:
    right = inputs(7, 3, torch.float32)
    short, numbers = right.behaviour[:-1], right.mask.long()
    bad = LossInputs(right.logprobs, short, right.advantages, numbers, right.proximal, right.sequence, 3)
    with jaxtyping.jaxtyped("context"):
        assert wrong(bad, INPUTS) == ["behaviour", "mask"]
        assert wrong(LossOutputs(short, right.mask), OUTPUTS) == ["losses"]
