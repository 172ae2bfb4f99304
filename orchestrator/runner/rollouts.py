"""Stored rollouts: one parquet file a step, complete by rename."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
        ("loss_mask", pa.list_(pa.uint8())),
        ("ref_logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("values", pa.list_(pa.float32())),
        ("bootstrap_value", pa.float64()),
        ("returns", pa.list_(pa.float32())),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("generate_seconds", pa.float64()),
        ("reward_seconds", pa.float64()),
        ("reference_seconds", pa.float64()),
        ("critic_seconds", pa.float64()),
        ("peak_memory_bytes", pa.int64()),
    ]
)


def write_rollouts(folder: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    """Writes the samples that ``step`` trained on.

    Args:
        rows: one map a sample, by column; a column that is missing is null. Arrays stay arrays: an object of Python's
            for each of their tokens took more time than everything else here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.parquet"
    part = path.with_suffix(".tmp")
    columns = [_column([row.get(field.name) for row in rows], field.type) for field in _SCHEMA]
    pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), part, compression="zstd")
    part.replace(path)
    return path


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind) or pa.types.is_string(kind.value_type):
        return pa.array(values, type=kind)
    dtype = kind.value_type.to_pandas_dtype()
    arrays = [np.asarray(() if value is None else value, dtype) for value in values]
    ends = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    missing = pa.array([value is None for value in values], pa.bool_())
    flat = pa.array(np.concatenate(arrays) if arrays else np.zeros(0, dtype), type=kind.value_type)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, type=kind, mask=missing)


def drop_rollouts_after(folder: Path, step: int) -> None:
    """Removes what steps after ``step`` stored: a run that goes back makes them again."""
    for path in folder.glob("step_*.parquet"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
