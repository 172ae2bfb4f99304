"""Section ``checkpoint``: what is kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nightshift.config.base import Section


class CheckpointConfig(Section):
    """Resume states and HF exports under ``<runs>/<job id>/checkpoints``."""

    keep: int | None = Field(default=2, ge=1)
    """Newest checkpoints that stay; null: all."""

    export: bool = True
    """Write an HF folder with each checkpoint."""

    export_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the export; null: that of the trainer's parameters."""
