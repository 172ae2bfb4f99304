"""Stored rollouts: one parquet file a step, complete by rename."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("trained_version", pa.string()),
        ("group_id", pa.string()),
        ("sample_id", pa.string()),
        ("row_id", pa.string()),
        ("epoch", pa.int64()),
        ("trace_id", pa.string()),
        ("prompt_text", pa.string()),
        ("response_text", pa.string()),
        ("reward", pa.float64()),
        ("reward_error", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("response_tokens", pa.int64()),
        ("versions", pa.list_(pa.string())),
        ("version_starts", pa.list_(pa.int64())),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("generate_seconds", pa.float64()),
        ("reward_seconds", pa.float64()),
        ("reference_seconds", pa.float64()),
    ]
)


def write_rollouts(folder: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    """Writes the samples that ``step`` trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.parquet"
    part = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), part, compression="zstd")
    part.replace(path)
    return path


def drop_rollouts_after(folder: Path, step: int) -> None:
    """Removes what steps after ``step`` stored: a run that goes back makes them again."""
    for path in folder.glob("step_*.parquet"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
