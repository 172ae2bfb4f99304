"""Sums over trained tokens that pieces of a batch report, and the metrics of the whole batch made of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nightshift.config.algorithm import PREFERENCE_LOSSES
from nightshift.wire.experience import LossSpec
from services.trainer.aggregate import divisor
from services.trainer.checks import VALUE_LOSS


@dataclass(frozen=True, slots=True)
class PartSums:
    """Sums of one piece (micro-batch, part or rank) of a batch, float64."""

    tokens: float = 0.0  # trained tokens
    sequences: float = 0.0  # samples with a trained token
    positions: float = 0.0  # token positions that went through the model, padding included
    loss: float = 0.0  # partial sums of the whole loss, before division
    policy: float = 0.0  # the same of the policy term alone
    kl: float = 0.0  # sum of the KL estimate over tokens
    entropy: float = 0.0  # nats, summed over tokens
    clipped: float = 0.0  # tokens whose policy loss was clipped
    kl_clamped: float = 0.0  # tokens whose log ratio to the reference was clamped
    abs_log_ratio: float = 0.0  # sum of |log pi - log mu|
    chosen: float = 0.0  # implicit rewards of chosen responses, summed over preference pairs
    rejected: float = 0.0  # the same of rejected ones
    preferred: float = 0.0  # pairs whose chosen response has the higher one
    max_ratio: float = 0.0  # largest pi/mu; merged by maximum

    def __add__(self, other: PartSums) -> PartSums:
        values = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        values["max_ratio"] = max(self.max_ratio, other.max_ratio)
        return PartSums(**values)


def to_metrics(sums: PartSums, spec: LossSpec, batch_divisor: float | None = None) -> dict[str, float]:
    """Metrics of a batch.

    ``loss/actor`` is aggregated as the specification says; ``kl``, ``entropy``, ``clip_fraction`` and
    ``log_ratio/abs_mean`` are means over trained tokens. Without a trained token only ``tokens`` is there.

    Args:
        sums: of the whole batch.
        spec: the loss.
        batch_divisor: what the loss was divided by; None: what the sums themselves give.
    """
    metrics = {"tokens": sums.tokens, "sequences": sums.sequences, "positions": sums.positions}
    if not sums.tokens:
        return metrics
    if batch_divisor is None:
        batch_divisor = divisor(spec.aggregation, int(sums.tokens), int(sums.sequences), spec.constant_length)
    if spec.policy_loss == VALUE_LOSS:
        return metrics | {"loss/critic": sums.loss / batch_divisor, "critic/clip_fraction": sums.clipped / sums.tokens}
    if spec.policy_loss in PREFERENCE_LOSSES:
        pairs = sums.sequences / 2
        metrics |= {
            "preference/chosen_reward": sums.chosen / pairs,
            "preference/rejected_reward": sums.rejected / pairs,
            "preference/margin": (sums.chosen - sums.rejected) / pairs,
            "preference/accuracy": sums.preferred / pairs,
        }
    metrics |= {
        "loss/actor": sums.loss / batch_divisor,
        "loss/policy": sums.policy / batch_divisor,
        "entropy": sums.entropy / sums.tokens,
        "clip_fraction": sums.clipped / sums.tokens,
        "log_ratio/abs_mean": sums.abs_log_ratio / sums.tokens,
        "ratio/max": sums.max_ratio,
    }
    if spec.kl_coef:
        metrics |= {"kl": sums.kl / sums.tokens, "kl/clamped": sums.kl_clamped}
    return metrics
