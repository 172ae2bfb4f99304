"""Section ``tracking``: where metrics and traces go."""

from __future__ import annotations

from pydantic import Field

from nightshift.config.base import Section


class TrackingConfig(Section):
    """``events.jsonl`` and ``metrics.jsonl`` are always written."""

    tensorboard: bool = True
    """Write TensorBoard files to ``tensorboard/``."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """OTLP/gRPC endpoint to which spans are exported as well."""

    rollouts: bool = True
    """Store each rollout in ``rollouts/*.parquet``."""
