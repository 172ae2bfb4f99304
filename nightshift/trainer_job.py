"""What :class:`nightshift.Trainer` makes of its arguments: a job file, and batches as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nightshift.wire.errors import BadInputError

#: Rows with ``prompt`` and what the reward reads, or columns of equal length.
Batch = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """A batch as rows.

    Raises:
        BadInputError: its columns differ in length, or a row has no prompt.
    """
    if isinstance(batch, Mapping):
        lengths = {name: len(values) for name, values in batch.items()}
        if len(set(lengths.values())) != 1:
            raise BadInputError(f"the columns of a batch must have one length, got {lengths}", role="job")
        batch = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    rows = [dict(row) for row in batch]
    if not rows or not all("prompt" in row for row in rows):
        raise BadInputError("a batch must hold rows with a prompt", role="job")
    return rows


def job_file(
    actor: str, critic: str | None, reward: str, reference: str | None, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The job file of a trainer's arguments; ``config`` overrides."""
    if reward.startswith("grpc://"):
        rewards: dict[str, Any] = {"type": "grpc", "url": reward, "name": "reward"}
    elif ".py:" in reward:
        rewards = {"function": reward}
    else:
        rewards = {"type": "classifier", "model": reward}
    job: dict[str, Any] = {"name": "trainer", "model": {"path": actor}, "rewards": [rewards]}
    if critic is not None:
        job |= {"scorers": {"critic": {"model": critic}}, "algorithm": {"estimator": "gae"}}
    if reference is not None:
        job = merged(job, {"scorers": {"reference": {"model": reference}}})
    return merged(job, config)


def check_job(job: Mapping[str, Any]) -> None:
    """Checks what can be checked before there are prompts.

    Raises:
        BadInputError: names each field that is wrong.
    """
    from pydantic import ValidationError

    from nightshift.config import JobSpec
    from nightshift.config.messages import explain_all

    try:
        JobSpec.model_validate(merged({"data": {"train_files": ["-"]}}, job))
    except ValidationError as errors:
        raise BadInputError("; ".join(text for _, text in explain_all(errors)), role="job") from errors


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested maps as one, in which the second one counts."""
    out = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out
