"""What an audit believes: the trainer's manifests, the stored rollouts and the request logs of the servers.

Neither the database nor the events of the run are read: they are the runner's own word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import Ids, VersionSpan
from nightshift.wire.request_log import RequestLog, read_logs

_STEP = re.compile(r"step_(\d+)\.parquet")
_COLUMNS = [
    "step",
    "trained_version",
    "group_id",
    "sample_id",
    "row_id",
    "epoch",
    "finish_reason",
    "versions",
    "version_starts",
    "prompt_ids",
    "response_ids",
]

Manifest = dict[str, Any]
#: Types of the fields that an audit reads, where a manifest has them.
_TYPES: dict[str, type] = {
    "run_id": str,
    "branches": list,
    "issued": int,
    **dict.fromkeys(("consumed", "rules", "incomplete", "ledger", "cursor", "ended", "trainer"), dict),
    "in_flight": list,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One stored sample."""

    step: int  # that trained it
    trained_version: str  # of the weights before that step
    group_id: str
    sample_id: str
    row_id: str
    epoch: int
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    prompt_ids: Ids  # [P] int32
    response_ids: Ids  # [T] int32


@dataclass(slots=True)
class Evidence:
    """What a run left behind.

    Attributes:
        manifests: of all commits, also of those whose checkpoint is gone.
        newest: the commit that holds the final weights.
        rollouts: step and stored samples of each step in order; read as they are walked over.
        log: what the servers wrote down.
    """

    manifests: list[Manifest]
    newest: Manifest
    rollouts: Iterable[tuple[int, list[Row]]]
    log: RequestLog


def load(run_dir: Path) -> Evidence:
    """Reads a run's folder; rows are read when they are needed.

    Raises:
        BadInputError: nothing is committed yet, or a file is malformed.
    """
    checkpoints = run_dir / "checkpoints"
    committed = [_manifest(path) for path in sorted(checkpoints.glob("trainer/global_step_*/manifest.json"))]
    if not committed:
        raise BadInputError(
            f"the run {run_dir.name!r} has no checkpoint: nothing is committed yet, so there is nothing to audit",
            fix="Wait for a checkpoint, or set trainer.save_freq",
        )
    copies = [_manifest(path) for path in sorted(checkpoints.glob("manifests/*.json"))]
    # The trainer's own file counts; the copies are for checkpoints that are gone.
    known = {(manifest["lineage"], manifest["step"]): manifest for manifest in [*copies, *committed]}
    return Evidence(
        manifests=[known[key] for key in sorted(known)],
        newest=max(committed, key=lambda manifest: int(manifest["step"])),
        rollouts=_stored(run_dir / "rollouts"),
        log=read_logs(run_dir / "logs"),
    )


def _stored(folder: Path) -> Iterator[tuple[int, list[Row]]]:
    found = {int(match[1]): path for path in folder.glob("*") if (match := _STEP.fullmatch(path.name))}
    for step, path in sorted(found.items()):
        yield step, read_rows(path)


def read_rows(path: Path) -> list[Row]:
    """The samples of a file of stored rollouts.

    Raises:
        BadInputError: it is none.
    """
    try:
        rows = pq.read_table(path, columns=_COLUMNS).to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise BadInputError(f"{path} cannot be read as stored rollouts: {error}") from error
    return [_row(values) for values in rows]


def _row(values: dict[str, Any]) -> Row:
    starts = [*(values.pop("version_starts") or []), len(values["response_ids"])]
    versions = values.pop("versions") or []
    return Row(
        **{
            **values,
            "versions": tuple(
                VersionSpan(version, start, end)
                for version, start, end in zip(versions, starts, starts[1:], strict=False)
            ),
            "prompt_ids": np.array(values["prompt_ids"], np.int32),
            "response_ids": np.array(values["response_ids"], np.int32),
        }
    )


def _manifest(path: Path) -> Manifest:
    try:
        manifest = json.loads(path.read_text())
        if not all(type(manifest[name]) is int for name in ("lineage", "step")):
            raise ValueError("lineage and step must be integers")
        for name, kind in _TYPES.items():
            if name in manifest and not isinstance(manifest[name], kind):
                raise ValueError(f"{name} must be {kind.__name__}, is {str(manifest[name])[:80]}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path} is no manifest of a checkpoint: {error}") from error
    return dict(manifest)
