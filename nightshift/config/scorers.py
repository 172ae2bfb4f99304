"""Section ``scorers``: reference, teacher and critic, and how scorers are called."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from nightshift.config.base import Section
from nightshift.config.model import DType

#: How a model begins that is an address and no folder.
REMOTE = ("grpc://", "http://", "https://")


class MixedReference(Section):
    """A further reference behind a URL, mixed into the first one."""

    url: str = Field(pattern=r"^(grpc|https?)://\S+$")
    """``grpc://host:port`` of a scorer that gives log-probs, or ``http://host:port`` of a vLLM server."""
    weight: float = Field(gt=0, lt=1)
    """Its share of the mixture."""


class ReferenceConfig(Section):
    """The frozen model of the KL term."""

    model: str | None = None
    """HF id, folder, ``grpc://host:port`` or the ``http://host:port`` of a vLLM server; null: the policy as it was
    before training."""

    mixed_with: list[MixedReference] = Field(default_factory=list)
    """Further references: the KL term is then to the mixture of the distributions, of which ``model`` has the rest."""

    dtype: DType = "float32"
    """Precision of the reference."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Sequences per forward pass."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of the reference."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if sum(other.weight for other in self.mixed_with) >= 1:
            raise ValueError("the weights of scorers.reference.mixed_with must add up to less than 1")
        return self


class TeacherConfig(Section):
    """The frozen model that a distillation learns from."""

    model: str
    """HF id, folder, ``grpc://host:port`` or the ``http://host:port`` of a vLLM server; it must have the policy's
    vocabulary."""

    dtype: DType = "float32"
    """Precision of the teacher."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Sequences per forward pass."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of the teacher."""


class CriticConfig(Section):
    """The value model: trained by DeepSpeed ranks of its own, and served to the run by Ray Serve."""

    model: str | None = None
    """HF id or folder; null: the policy as it was before training. A value head that the folder lacks begins at 0."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic's AdamW, after the warm-up; its schedule is that of the trainer."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Largest change of a value by an update before its loss stops falling (PPO's clipped value loss); null: none."""

    loss_aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """How the value losses of tokens become one number over the whole batch."""

    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which the critic is trained alone, and the policy stays as it is."""

    dtype: DType = "float32"
    """Precision of the parameters, in training and in the deployment."""
    micro_batch_size: int = Field(default=4, ge=1)
    """Sequences per pass, in training and in the deployment."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What ZeRO shards over the critic's ranks."""
    ranks: int = Field(default=1, ge=1)
    """Processes that train the critic."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank and of the deployment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""


class ScorersConfig(Section):
    """Ray Serve deployments that score samples."""

    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL term."""
    critic: CriticConfig | None = None
    """Value model of PPO (estimators gae and vtrace); null: none. ``critic: {}`` takes all defaults."""

    teacher: TeacherConfig | None = None
    """Frozen model of the estimator distillation; null: none."""

    batch_samples: int = Field(default=32, ge=1)
    """Most samples in one call to a scorer."""

    batch_wait_ms: float = Field(default=20.0, ge=0)
    """How long a call waits for further samples, at least: up to a twentieth of what the scorer last took, and up to
    250 ms; 0: no call waits."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one attempt to ask the reference or the critic; it is made again as long as a role may be away
    (``pipeline.role_timeout_s``). A reward's own limit is in ``rewards``."""

    start_timeout_s: float = Field(default=180.0, gt=0)
    """Longest time until the deployments answer."""
