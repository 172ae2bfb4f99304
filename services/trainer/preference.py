"""Losses on pairs of a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nightshift.config.algorithm import PREFERENCE_LOSSES
from nightshift.wire.experience import LossSpec, Sample
from services.trainer.losses import LossInputs, LossOutputs

if TYPE_CHECKING:
    from jaxtyping import Float

#: Sums over pairs that a preference loss reports: implicit rewards of both sides, and pairs in the right order.
SUMS = ("chosen", "rejected", "preferred")


def units(samples: Sequence[Sample], spec: LossSpec) -> list[list[Sample]]:
    """What must stay together in one forward pass: pairs for a preference loss, else single samples."""
    size = 2 if spec.policy_loss in PREFERENCE_LOSSES else 1
    return [list(samples[at : at + size]) for at in range(0, len(samples), size)]


def preference_loss(inputs: LossInputs, reference: Float[Tensor, " T"], spec: LossSpec) -> LossOutputs:
    """DPO or IPO over the pairs of a micro-batch.

    With s = (log pi(chosen) - log ref(chosen)) - (log pi(rejected) - log ref(rejected)), sums over the trained tokens:
    DPO is -(1 - e) log sigmoid(beta s) - e log sigmoid(-beta s) with label smoothing e (Rafailov et al. 2023, eq. 7;
    conservative DPO, Mitchell 2023), IPO is (s - 1 / (2 beta))^2 (Azar et al. 2024, eq. 17).

    Args:
        inputs: tokens of 2 P samples, chosen and rejected in turn.
        reference: [T] log-probs of the reference.
        spec: ``options`` holds ``beta`` and, for DPO, ``label_smoothing``.

    Returns:
        Each token carries its pair's loss divided by the trained tokens of its own sample, so that the sum over all
        tokens is twice the sum over the pairs, and ``seq_mean_token_sum`` is the mean over the pairs.
    """
    beta, smoothing = spec.options["beta"], spec.options.get("label_smoothing", 0.0)
    gain = inputs.sequence_sum(inputs.logprobs - reference)
    chosen, rejected = gain[0::2], gain[1::2]
    difference = chosen - rejected
    if spec.policy_loss == "ipo":
        pairs = (difference - 1.0 / (2.0 * beta)) ** 2
    else:
        pairs = -(1.0 - smoothing) * logsigmoid(beta * difference) - smoothing * logsigmoid(-beta * difference)
    tokens = inputs.sequence_sum(torch.ones_like(inputs.logprobs)).clamp(min=1)
    with torch.no_grad():
        sums = {
            "chosen": beta * chosen.sum(),
            "rejected": beta * rejected.sum(),
            "preferred": (difference > 0).to(difference.dtype).sum(),
        }
    losses = inputs.per_token(pairs.repeat_interleave(2) / tokens)
    return LossOutputs(losses, torch.zeros_like(inputs.mask), sums)
