"""Section ``algorithm``: advantages and loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nightshift.config.base import Section


class AlgorithmConfig(Section):
    """How rewards become advantages, and advantages a loss."""

    estimator: str = "grpo"
    """Advantage estimator: a registered name (grpo, dr_grpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, gae), or a function of (batch, config): ``path.py:function``."""

    std: Literal["sample", "population"] = "sample"
    """Standard deviation that GRPO divides by."""

    epsilon: float = Field(default=1e-6, gt=0)
    """Added to GRPO's standard deviation."""

    policy_loss: str = "ppo_clip"
    """Registered name of the policy loss."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped to at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped to at most 1 + clip_high."""

    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = (
        "token_mean"
    )
    """How token losses become one number over the whole batch."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the reference; 0: the reference is not started."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term (k1, k2, k3 of Schulman, "Approximating KL divergence", 2020)."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term stands: in the loss, or as a penalty on each token's reward (REINFORCE++: with k1)."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token of GAE and V-trace."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Trace decay of GAE and V-trace."""

    bootstrap_truncated: bool = False
    """Whether a response that the length limit cut is valued as if it went on (GAE), or as ended."""

    whiten_advantages: bool = False
    """Bring the token advantages of the whole batch to mean 0 and variance 1, after any estimator."""

    max_log_ratio_warn: float = Field(default=0.1, gt=0)
    """Mean |log ratio| between trainer and sampler in the first step above which a warning is given."""
