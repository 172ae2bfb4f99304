"""Section ``algorithm``: advantages and loss."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from nightshift.config.base import Section
from nightshift.config.functions import is_reference

#: Policy losses by name, and whether their ratio is taken against the policy that sampled (which corrects for it).
POLICY_LOSSES = {
    "ppo_clip": True,
    "ppo_clip_proximal": False,
    "decoupled_ppo": True,
    "gspo": True,
    "cispo": True,
}
#: Losses on pairs of a chosen and a rejected response: such a job samples nothing.
PREFERENCE_LOSSES = ("dpo", "ipo")


def _check_loss(name: str) -> str:
    known = (*POLICY_LOSSES, *PREFERENCE_LOSSES)
    if name not in known and not is_reference(name):
        raise ValueError(
            f"algorithm.policy_loss {name!r} is unknown: choose one of {', '.join(known)}, path.py:function "
            "or package.module.function"
        )
    return name


class AlgorithmConfig(Section):
    """How rewards become advantages, and advantages a loss."""

    estimator: str = "grpo"
    """Advantage estimator: a registered name (grpo, dr_grpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, gae, vtrace, distillation), or a function of (batch, config): ``path.py:function``
    or ``package.module.function``."""

    std: Literal["sample", "population"] = "sample"
    """Standard deviation that GRPO divides by."""

    epsilon: float = Field(default=1e-6, gt=0)
    """Added to GRPO's standard deviation."""

    policy_loss: Annotated[str, AfterValidator(_check_loss)] = "ppo_clip"
    """Policy loss: ppo_clip, ppo_clip_proximal, decoupled_ppo, gspo, cispo; dpo, ipo on preference data; or a function
    of (inputs, spec) that returns [T] losses: ``path.py:function`` or ``package.module.function``."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped to at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped to at most 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest loss of a token with a negative advantage, as a multiple of it (dual-clip PPO); null: none.
    cispo, whose weight is bounded already, takes no notice of it."""

    importance_cap: float | None = Field(default=None, gt=0)
    """Weight of a token by trainer over sampler, at most this (with policy_loss ppo_clip_proximal); null: none."""
    importance_floor: float | None = Field(default=None, gt=0)
    """Tokens whose weight is below this are left out of the loss (with importance_mode mask: IcePop); null: none."""
    sequence_importance_cap: float | None = Field(default=None, gt=0)
    """The same for the product over a response; null: none."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """What happens above a cap: the weight stays at the cap, or becomes 0."""
    behaviour_cap: float | None = Field(default=None, gt=0)
    """Tokens of decoupled_ppo whose weight by trainer over sampler is above this are left out; null: none."""

    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = (
        "token_mean"
    )
    """How token losses become one number over the whole batch."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the reference; 0: the reference is not started."""

    kl_estimator: Literal["k1", "k2", "k3", "k1_st", "k3_st"] = "k3"
    """Estimator of the KL term (k1, k2, k3 of Schulman, "Approximating KL divergence", 2020); with _st the value is
    that of k1 or k3 and the gradient that of k2, which is the unbiased one. In the reward, _st changes nothing."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term stands: in the loss, or as a penalty on each token's reward (REINFORCE++: with k1)."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token of GAE and V-trace."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Trace decay of GAE and V-trace."""
    rho_max: float = Field(default=1.0, gt=0)
    """Largest importance weight of V-trace's temporal differences (rho bar)."""
    c_max: float = Field(default=1.0, gt=0)
    """Largest importance weight of V-trace's traces (c bar)."""

    bootstrap_truncated: bool = False
    """Whether a response that the length limit cut is valued as if it went on (GAE, V-trace), or as ended."""

    whiten_advantages: bool = False
    """Bring the token advantages of the whole batch to mean 0 and variance 1, after any estimator."""

    filter_zero_spread: bool = False
    """Leave out prompt groups whose rewards are all equal, and draw others in their place (DAPO's dynamic sampling)."""
    filter_limit: int = Field(default=20, ge=1)
    """Groups that may be left out in a row, as a multiple of the batch, before the job ends with that reason."""

    overlong_buffer: int | None = Field(default=None, ge=0)
    """Last tokens before ``rollout.max_response_length`` over which a penalty grows (DAPO's soft punishment); null:
    no penalty."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """The penalty at the length limit, taken off the reward."""
    mask_truncated: bool = False
    """Leave responses that the length limit cut out of the loss and of their group's comparison (overlong filter)."""

    preference_beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference in dpo and ipo."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of preference pairs that are taken to be the wrong way round (dpo)."""

    max_log_ratio_warn: float = Field(default=0.1, gt=0)
    """Mean |log ratio| between trainer and sampler in the first step above which a warning is given."""

    @property
    def loss_options(self) -> dict[str, float]:
        """Further parameters of the loss, as they go to the trainer; what is not set is left out."""
        given = {
            "dual_clip": self.dual_clip,
            "importance_cap": self.importance_cap,
            "importance_floor": self.importance_floor,
            "sequence_importance_cap": self.sequence_importance_cap,
            "behaviour_cap": self.behaviour_cap,
        }
        options = {name: float(value) for name, value in given.items() if value is not None}
        if self.importance_mode == "mask":
            for cap, mask in (
                ("importance_cap", "importance_mask"),
                ("sequence_importance_cap", "sequence_importance_mask"),
            ):
                if cap in options:
                    options[mask] = 1.0
        return options

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        """Refuses options that the chosen loss has no use for: they would be passed over, or fail at the first step."""
        loss = self.policy_loss
        weights = ("importance_cap", "importance_floor", "sequence_importance_cap")
        given = next((name for name in weights if getattr(self, name) is not None), None)
        if given is not None and (POLICY_LOSSES.get(loss, False) or self.is_preference):
            raise ValueError(
                f"algorithm.{given} weighs by trainer over sampler, and algorithm.policy_loss {loss!r} "
                + ("trains on pairs" if self.is_preference else "corrects for the sampler already")
                + ": leave it out, or set policy_loss to ppo_clip_proximal"
            )
        if self.behaviour_cap is not None and loss != "decoupled_ppo":
            raise ValueError(
                f"algorithm.behaviour_cap is for policy_loss decoupled_ppo, and policy_loss is {loss!r}: leave it out"
            )
        if self.dual_clip is not None and self.is_preference:
            raise ValueError(
                f"algorithm.dual_clip caps a clipped surrogate, which policy_loss {loss!r} has not: leave it out"
            )
        if self.label_smoothing and loss != "dpo":
            raise ValueError(
                f"algorithm.label_smoothing is for policy_loss dpo, and policy_loss is {loss!r}: leave it out"
            )
        return self

    @property
    def is_preference(self) -> bool:
        """Whether the job trains on pairs of a chosen and a rejected response."""
        return self.policy_loss in PREFERENCE_LOSSES
