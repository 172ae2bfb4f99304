"""The samples of a step as the run stored them, and whether their advantages follow from their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nightshift.algorithms import compute_advantages
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import Floats, Sample, VersionSpan
from nightshift.wire.schedule import StepRecord

_NEEDED = ("sample_id", "group_id", "prompt_ids", "response_ids", "logprobs", "loss_mask", "advantages", "reward")


def read_samples(run_dir: Path, record: StepRecord) -> dict[str, list[Sample]]:
    """The stored samples of a step by group, in the order in which they were trained.

    Raises:
        BadInputError: they were not stored, or not all of them, or without a column that the update needs.
    """
    path = run_dir / "rollouts" / f"step_{record.step:06d}.parquet"
    try:
        rows = pq.read_table(path).to_pylist()
    except FileNotFoundError:
        raise BadInputError(
            f"{path} is not there", role="job", fix="Only runs with tracking.rollouts can be replayed"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"cannot read {path}: {str(error).splitlines()[0]}", role="job") from error
    lacking = [name for name in _NEEDED if rows and name not in rows[0]]
    if lacking:
        raise BadInputError(f"{path} has no column {lacking[0]!r}", role="job", fix="It was stored by an older version")
    samples: dict[str, list[Sample]] = {}
    for row in rows:
        samples.setdefault(row["group_id"], []).append(_sample(row))
    for group in (group for part in record.parts for group in part):
        if group not in samples:
            raise BadInputError(f"{path} has no group {group}, which step {record.step} trained", role="job")
    return samples


def _sample(row: dict[str, Any]) -> Sample:
    tokens = len(row["response_ids"])
    starts = row.get("version_starts") or []
    ends = [*starts[1:], tokens]
    return Sample(
        sample_id=row["sample_id"],
        group_id=row["group_id"],
        trace_id=row.get("trace_id") or "",
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        response_ids=np.array(row["response_ids"], np.int32),
        logprobs=np.array(row["logprobs"], np.float32),
        loss_mask=np.array(row["loss_mask"], np.uint8),
        versions=[
            VersionSpan(version, start, end)
            for version, start, end in zip(row.get("versions") or [], starts, ends, strict=True)
        ]
        if starts
        else [VersionSpan("", 0, tokens)],
        finish_reason=row.get("finish_reason") or "stop",
        reward=row["reward"],
        ref_logprobs=_floats(row.get("ref_logprobs")),
        advantages=_floats(row.get("advantages")),
        values=_floats(row.get("values")),
        bootstrap_value=row.get("bootstrap_value") or 0.0,
        returns=_floats(row.get("returns")),
        teacher_logprobs=_floats(row.get("teacher_logprobs")),
    )


def _floats(values: list[float] | None) -> Floats | None:
    return None if values is None else np.array(values, np.float32)


def advantage_difference(
    stored: Sequence[Sample], config: AlgorithmConfig, target_logprobs: Sequence[NDArray[np.floating]] | None = None
) -> float:
    """Largest difference of the stored advantages, and of the critic's stored returns, from those that the stored
    rewards and values give.

    Args:
        stored: the samples of one part of an update.
        config: section ``algorithm`` as it held for the step.
        target_logprobs: [T_i] of each sample under the policy that the step started from, for V-trace.

    Raises:
        NightshiftError: an estimator that needs more than was stored.
    """
    again = [replace(sample, advantages=None, returns=None) for sample in stored]
    valued = any(sample.values is not None for sample in stored)
    none = np.zeros(0, np.float32)
    compute_advantages(
        again,
        config,
        values=[none if sample.values is None else sample.values for sample in stored] if valued else None,
        bootstraps=[sample.bootstrap_value for sample in stored] if valued else None,
        target_logprobs=target_logprobs,
    )
    pairs = [
        (getattr(one, name), getattr(other, name))
        for name in ("advantages", "returns")
        for one, other in zip(stored, again, strict=True)
    ]
    both = [(one, other) for one, other in pairs if one is not None and other is not None and len(one)]
    return max((float(np.abs(one - other).max()) for one, other in both), default=0.0)
