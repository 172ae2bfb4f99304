"""Section ``scorers``: reference and critic deployments, and how scorers are called."""

from __future__ import annotations

from pydantic import Field

from nightshift.config.base import Section
from nightshift.config.model import DType


class ReferenceConfig(Section):
    """The frozen model of the KL term."""

    model: str | None = None
    """HF id, folder, or ``grpc://host:port``; null: the policy as it was before training."""

    dtype: DType = "float32"
    """Precision of the reference."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Sequences per forward pass."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of the reference."""


class ScorersConfig(Section):
    """Ray Serve deployments that score samples."""

    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL term."""
    critic: None = None
    """Value model; comes with PPO. Null: none."""

    batch_samples: int = Field(default=32, ge=1)
    """Most samples in one call to a scorer."""

    batch_wait_ms: float = Field(default=20.0, ge=0)
    """How long a call waits for further samples."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one call to the reference or the critic. A reward's own limit is in ``rewards``."""

    start_timeout_s: float = Field(default=180.0, gt=0)
    """Longest time until the deployments answer."""
