"""Section ``tracking``: where metrics and traces go."""

from __future__ import annotations

from pydantic import Field

from nightshift.config.base import Section


class TrackingConfig(Section):
    """``events.jsonl`` and ``metrics.jsonl`` are always written."""

    tensorboard: bool = True
    """Write TensorBoard files to ``tensorboard/``."""
    wandb: str | None = Field(default=None, min_length=1)
    """Project of Weights & Biases. The run is written to ``wandb/`` in the run's folder; ``wandb sync`` uploads it."""

    mlflow: str | None = Field(default=None, min_length=1)
    """Tracking URI of MLflow, such as ``http://host:5000`` or ``sqlite:////folder/mlflow.db``."""

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """OTLP/gRPC endpoint to which spans are exported as well; all of them, since a collector samples for itself."""
    trace_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the groups' traces that ``events.jsonl`` stores; failed and slow ones are stored besides."""

    rollouts: bool = True
    """Store each rollout in ``rollouts/*.parquet``."""

    debug_mode: bool = False
    """Record shapes, dtypes and devices of the tensors at each boundary, as events of kind ``tensors``."""
