"""A second check of each policy loss: finite differences, and samples together against samples one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nightshift.wire.experience import LossSpec
from services.trainer.aggregate import divisor
from services.trainer.losses import POLICY_LOSSES, LossInputs, kl_terms, policy_loss

SPECS = {name: LossSpec(policy_loss=name, clip_high=0.28) for name in POLICY_LOSSES} | {
    "dual": LossSpec(options={"dual_clip": 1.5}),
    "truncated": LossSpec(policy_loss="ppo_clip_proximal", options={"importance_cap": 1.2}),
    "icepop": LossSpec(
        policy_loss="ppo_clip_proximal",
        options={"importance_cap": 1.3, "importance_mask": 1.0, "importance_floor": 0.8},
    ),
    "sequence": LossSpec(policy_loss="ppo_clip_proximal", options={"sequence_importance_cap": 1.5}),
    "behaviour_cap": LossSpec(policy_loss="decoupled_ppo", options={"behaviour_cap": 1.2}),
}


def random_inputs(seed: int, sizes: tuple[int, ...] = (3, 5, 1)) -> LossInputs:
    """Samples of these sizes with ratios on both sides of the clip, some tokens masked."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> Tensor:
        return torch.randn(sum(sizes), generator=generator, dtype=torch.float64) * scale

    prox = -1.5 + draw(0.3)
    mask = torch.rand(sum(sizes), generator=generator) > 0.2
    sequence = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    logprobs = (prox + draw(0.25)).requires_grad_()
    return LossInputs(logprobs, prox + draw(0.25), draw(), mask, prox, sequence, len(sizes))


def total(inputs: LossInputs, spec: LossSpec) -> Tensor:
    return policy_loss(inputs, spec).losses.masked_fill(~inputs.mask, 0.0).sum()


@pytest.mark.parametrize("name", sorted(set(SPECS) - {"cispo"}))
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_finite_differences(name: str, seed: int) -> None:
    inputs, spec, step = random_inputs(seed), SPECS[name], 1e-6
    total(inputs, spec).backward()
    gradient = inputs.logprobs.grad
    assert gradient is not None
    values = inputs.logprobs.detach()
    for token in range(len(values)):
        moved = [values.clone(), values.clone()]
        moved[0][token] += step
        moved[1][token] -= step
        above, below = (float(total(replace(inputs, logprobs=m), spec)) for m in moved)
        assert float(gradient[token]) == pytest.approx((above - below) / (2 * step), abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_o18_the_gradient_of_cispo_is_the_clipped_ratio_times_the_advantage(seed: int) -> None:
    inputs, spec = random_inputs(seed), SPECS["cispo"]
    total(inputs, spec).backward()
    ratio = (inputs.logprobs.detach() - inputs.behaviour).exp().clamp(0.8, 1.28)
    expected = (-ratio * inputs.advantages).masked_fill(~inputs.mask, 0.0)
    assert torch.allclose(inputs.logprobs.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_samples_together_give_what_they_give_one_by_one(name: str, dtype: torch.dtype) -> None:
    whole = random_inputs(9)
    fields: dict[str, Any] = {
        key: getattr(whole, key).detach().to(dtype) for key in ("logprobs", "behaviour", "advantages", "proximal")
    }
    whole = replace(whole, **fields)
    together = policy_loss(whole, SPECS[name]).losses
    for number in range(whole.sequences):
        of = whole.sequence == number
        alone = LossInputs(
            whole.logprobs[of],
            whole.behaviour[of],
            whole.advantages[of],
            whole.mask[of],
            whole.proximal[of],  # type: ignore[index]
        )
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        assert torch.allclose(policy_loss(alone, SPECS[name]).losses, together[of], atol=tolerance)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradients_are_finite_differences(kind: str) -> None:
    inputs, step = random_inputs(2), 1e-6
    kl_terms(inputs.logprobs, inputs.behaviour, kind)[0].sum().backward()
    values = inputs.logprobs.detach()
    above, below = (kl_terms(values + d, inputs.behaviour, kind)[0] for d in (step, -step))
    assert torch.allclose(inputs.logprobs.grad, (above - below) / (2 * step), atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_o14_totals_divide_and_means_of_means_do_not(dtype: torch.dtype) -> None:
    parts = [torch.full((2,), 2.0, dtype=dtype), torch.full((6,), 5.0, dtype=dtype)]
    assert float(sum(part.sum() for part in parts)) / divisor("token_mean", 8, 2) == 4.25
