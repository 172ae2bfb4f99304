"""Policy losses: pure functions of the tokens of one sample, or of several, that return one loss per token.

The functions know nothing of batches: what happens to the token losses is in :mod:`services.trainer.aggregate`.
``mu`` is the behaviour policy that sampled the tokens, ``prox`` the policy as it was before this optimiser step. Since
a batch gets one step, ``prox`` is the current policy without its gradient unless it is given.

Shapes stand in the types: T tokens; B samples, or no axis where there is one. Nothing checks them while a job runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nightshift.algorithms.custom import load_custom
from nightshift.config.functions import is_reference
from nightshift.wire.errors import BadInputError, RoleError
from nightshift.wire.experience import LossSpec
from services.trainer.checks import check_loss_spec

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64, Shaped

#: |log ratio| above which exp() is no longer taken at face value: e^20 is far outside every clip range, and float32
#: overflows at e^88, which would turn a clipped token's zero gradient into NaN.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """T response tokens: those of one sample, or of B samples one after the other."""

    logprobs: Float[Tensor, " T"]  # log pi, with gradient
    behaviour: Float[Tensor, " T"]  # log mu
    advantages: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]  # true where the token is trained on
    proximal: Float[Tensor, " T"] | None = None  # log prox; None: pi without its gradient
    sequence: Int64[Tensor, " T"] | None = None  # number of the token's sample; None: one sample
    sequences: int = 1  # B

    @property
    def prox(self) -> Float[Tensor, " T"]:
        """Log-probs of the policy before this optimiser step, without gradient."""
        return self.logprobs.detach() if self.proximal is None else self.proximal

    def sequence_sum(self, values: Float[Tensor, " T"]) -> Float[Tensor, "*B"]:
        """Sum of [T] values over the trained tokens of each sample: [B], or a scalar where there is one sample."""
        kept = values.masked_fill(~self.mask, 0.0)
        if self.sequence is None:
            return kept.sum()
        return kept.new_zeros(self.sequences).index_add(0, self.sequence, kept)

    def per_token(self, values: Shaped[Tensor, "*B"]) -> Shaped[Tensor, " T"]:
        """The sample's value, of what :meth:`sequence_sum` gives, for each of its tokens: [T]."""
        return values.expand(len(self.logprobs)) if self.sequence is None else values[self.sequence]


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Per-token results of a loss."""

    losses: Float[Tensor, " T"]  # with gradient
    clipped: Bool[Tensor, " T"]  # true where the clip took effect
    sums: dict[str, Float[Tensor, ""]] = field(default_factory=dict)  # further sums over the samples, without gradient


PolicyLoss = Callable[[LossInputs, LossSpec], LossOutputs]
POLICY_LOSSES: dict[str, PolicyLoss] = {}


def policy_loss(inputs: LossInputs, spec: LossSpec) -> LossOutputs:
    """The loss that ``spec.policy_loss`` names, with the importance weights that ``spec.options`` asks for.

    Raises:
        BadInputError: unknown loss or option.
    """
    check_loss_spec(spec)
    if is_reference(spec.policy_loss):
        outputs = _custom_loss(inputs, spec)
    elif spec.policy_loss in POLICY_LOSSES:
        outputs = POLICY_LOSSES[spec.policy_loss](inputs, spec)
    else:
        raise BadInputError(f"{spec.policy_loss!r} is no policy loss", role="trainer", fix="Send it to its own rank")
    weight = importance_weight(inputs, spec)
    return outputs if weight is None else replace(outputs, losses=outputs.losses * weight)


_load = functools.lru_cache(maxsize=8)(load_custom)


def _custom_loss(inputs: LossInputs, spec: LossSpec) -> LossOutputs:
    """A loss of the user's own: ``function(inputs, spec)`` gives [T] losses, or a :class:`LossOutputs`.

    Raises:
        BadInputError: it cannot be loaded.
        RoleError: it raised, or what it returned is no loss per token with a gradient.
    """
    function = _load(spec.policy_loss, "algorithm.policy_loss")
    name = f"algorithm.policy_loss {spec.policy_loss!r}"
    try:
        found = function(inputs, spec)
    except Exception as error:  # whatever the user's code raises
        raise RoleError(f"{name} raised {type(error).__name__}: {error}", role="trainer") from error
    outputs = found if isinstance(found, LossOutputs) else LossOutputs(found, torch.zeros_like(inputs.mask))
    losses = outputs.losses
    if not isinstance(losses, Tensor) or losses.shape != inputs.logprobs.shape:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise RoleError(
            f"{name} returned {shape}, expected one loss per token: {tuple(inputs.logprobs.shape)}", role="trainer"
        )
    if inputs.logprobs.requires_grad and not losses.requires_grad:
        raise RoleError(f"{name} returned losses without a gradient", role="trainer", fix="Use inputs.logprobs")
    return outputs


def _register(function: PolicyLoss) -> PolicyLoss:
    POLICY_LOSSES[function.__name__] = function
    return function


def _ratio(numerator: Float[Tensor, "*S"], denominator: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    return (numerator - denominator).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _clip(ratio: Float[Tensor, " T"], advantages: Float[Tensor, " T"], spec: LossSpec) -> LossOutputs:
    """max(-r A, -clip(r) A) of Schulman et al. 2017, eq. 7.

    With ``dual_clip`` c, min(that, -c A) where A < 0 (Ye et al. 2020, eq. 5); a wider upper bound is DAPO's
    clip-higher (Yu et al. 2025, eq. 10).
    """
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high) * advantages
    losses = torch.maximum(plain, clipped)
    active = clipped > plain
    dual = spec.options.get("dual_clip")
    if dual:
        capped = -dual * advantages
        cut = (advantages < 0) & (losses > capped)
        losses = torch.where(cut, capped, losses)
        active = active | cut
    return LossOutputs(losses, active)


@_register
def ppo_clip(inputs: LossInputs, spec: LossSpec) -> LossOutputs:
    """PPO's clipped surrogate with the ratio pi/mu."""
    return _clip(_ratio(inputs.logprobs, inputs.behaviour), inputs.advantages, spec)


@_register
def ppo_clip_proximal(inputs: LossInputs, spec: LossSpec) -> LossOutputs:
    """PPO's clipped surrogate with the ratio pi/prox; corrected for mu by an importance option, if at all."""
    return _clip(_ratio(inputs.logprobs, inputs.prox), inputs.advantages, spec)


@_register
def decoupled_ppo(inputs: LossInputs, spec: LossSpec) -> LossOutputs:
    """(prox/mu) times PPO's surrogate against prox (Hilton et al. 2022, eq. 2; AReaL, Fu et al. 2025).

    With ``behaviour_cap``, tokens whose prox/mu is above it are left out.
    """
    outputs = _clip(_ratio(inputs.logprobs, inputs.prox), inputs.advantages, spec)
    weight = _ratio(inputs.prox, inputs.behaviour)
    cap = spec.options.get("behaviour_cap")
    if cap:
        weight = torch.where(weight > cap, torch.zeros_like(weight), weight)
    return LossOutputs(weight * outputs.losses, outputs.clipped)


@_register
def gspo(inputs: LossInputs, spec: LossSpec) -> LossOutputs:
    """One ratio per sequence, the geometric mean over its trained tokens (GSPO, Zheng et al. 2025, eq. 5 and 7).

    Each token carries the sequence's loss, so that the sequence mean of ``seq_mean_token_mean`` is the published one.
    """
    log_ratio = inputs.logprobs - inputs.behaviour
    tokens = inputs.sequence_sum(torch.ones_like(log_ratio)).clamp(min=1)
    mean = inputs.sequence_sum(log_ratio) / tokens
    ratio = inputs.per_token(mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp())
    return _clip(ratio, inputs.advantages, spec)


@_register
def cispo(inputs: LossInputs, spec: LossSpec) -> LossOutputs:
    """-sg(clip(pi/mu)) A log pi (MiniMax-M1, 2025, eq. 4): a clipped token still learns, with a bounded weight."""
    ratio = _ratio(inputs.logprobs.detach(), inputs.behaviour)
    weight = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    return LossOutputs(-weight * inputs.advantages * inputs.logprobs, weight != ratio)


def importance_weight(inputs: LossInputs, spec: LossSpec) -> Float[Tensor, " T"] | None:
    """Weights prox/mu that correct for a sampler that differs from the trainer (truncated importance sampling).

    ``spec.options``: ``importance_cap`` truncates each token's weight, or with ``importance_mask`` sets it to 0 above
    the cap; below ``importance_floor`` it is 0 (with both bounds and the mask: IcePop, Ling team 2025).
    ``sequence_importance_cap`` truncates one weight per sequence, the product over its trained tokens, or sets it to 0
    above the cap with ``sequence_importance_mask``.

    Returns:
        A weight per token or one for all, without gradient; None where no option asks for one.
    """
    token_cap = spec.options.get("importance_cap")
    token_floor = spec.options.get("importance_floor")
    sequence_cap = spec.options.get("sequence_importance_cap")
    if not token_cap and not token_floor and not sequence_cap:
        return None
    log_weight = (inputs.prox - inputs.behaviour).detach()
    weight = torch.ones_like(log_weight)
    if token_cap or token_floor:
        weight = log_weight.clamp(max=LOG_RATIO_BOUND).exp()
        if token_floor:
            weight = torch.where(weight < token_floor, torch.zeros_like(weight), weight)
        if token_cap and spec.options.get("importance_mask"):
            weight = torch.where(weight > token_cap, torch.zeros_like(weight), weight)
        elif token_cap:
            weight = weight.clamp(max=token_cap)
    if sequence_cap:
        total = inputs.sequence_sum(log_weight)
        sequence = total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if spec.options.get("sequence_importance_mask"):
            sequence = torch.where(sequence > sequence_cap, torch.zeros_like(sequence), sequence)
        weight = weight * inputs.per_token(sequence.clamp(max=sequence_cap))
    return weight


def kl_terms(
    logprobs: Float[Tensor, " T"], reference: Float[Tensor, " T"], estimator: str
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Per-token estimates of KL(pi || reference), to be differentiated (Schulman, "Approximating KL divergence", 2020).

    With r = log pi - log ref: k1 = r, k2 = r^2/2, k3 = exp(-r) - 1 + r. k3 is taken at r of at least
    -LOG_RATIO_BOUND, below which its value and its (then zero) gradient would overflow float32; above, it is about
    r - 1, and nothing has to be cut. ``k1_st`` and ``k3_st`` have the
    value of k1 and k3 and the gradient of k2, whose expectation is the gradient of the KL: that of k1 is 0, that of k3
    belongs to the KL the other way round (Tang and Munos, "On a few pitfalls in KL divergence gradient estimation for
    RL", 2025).

    Args:
        logprobs: [T] float32 with gradient.
        reference: [T] float32.
        estimator: "k1", "k2", "k3", "k1_st" or "k3_st".

    Returns:
        The terms [T], and [T] bool, true where the clamp took effect.
    """
    if estimator.endswith("_st"):
        value, clamped = kl_terms(logprobs.detach(), reference, estimator.removesuffix("_st"))
        slope = kl_terms(logprobs, reference, "k2")[0]
        return value + slope - slope.detach(), clamped
    r = logprobs - reference
    if estimator == "k1":
        return r, torch.zeros_like(r, dtype=torch.bool)
    if estimator == "k2":
        return 0.5 * r * r, torch.zeros_like(r, dtype=torch.bool)
    bounded = r.clamp(min=-LOG_RATIO_BOUND)
    return torch.expm1(-bounded) + bounded, bounded != r


def value_loss(
    values: Float[Tensor, " T"], old_values: Float[Tensor, " T"], returns: Float[Tensor, " T"], clip: float | None
) -> LossOutputs:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) of each token (PPO's reference implementation; Huang
    et al. 2022, "The 37 implementation details", 9).

    Args:
        values: [T] with gradient.
        old_values: [T], those that the advantages were computed from.
        returns: [T].
        clip: c; None: the squared error alone.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return LossOutputs(0.5 * plain, torch.zeros_like(values, dtype=torch.bool))
    limited = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (limited - returns) ** 2
    return LossOutputs(0.5 * torch.maximum(plain, clipped), clipped > plain)
