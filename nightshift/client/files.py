"""The files that a job brings along: found, named by their content, and referred to as uploads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nightshift.compat.loading import load_any
from nightshift.config import JobSpec
from nightshift.config.files import is_remote, local_files
from nightshift.config.load import parse_job
from nightshift.wire.errors import BadInputError

_CHUNK = 1 << 20
_SAFE = re.compile(r"[^A-Za-z0-9._-]")


def read_job(job: str | Path | dict[str, Any] | JobSpec, overrides: Sequence[str] = ()) -> JobSpec:
    """A job from a file, a map or a job; paths of a map are relative to the current folder.

    Raises:
        BadInputError: the job is wrong.
    """
    if isinstance(job, JobSpec):
        return job.model_copy(deep=True)
    if isinstance(job, dict):
        import yaml

        return parse_job(yaml.safe_dump(job).encode(), Path.cwd(), overrides, check_files=False)
    return load_any(Path(job), overrides, check_files=False)


def pack(spec: JobSpec, upload: Callable[[str, Path], None]) -> dict[str, Any]:
    """The job as the service takes it; each local file that it names is uploaded and replaced by a reference.

    A path that is not on this machine stays: it may be one of the server's.

    Args:
        spec: changed in place.
        upload: called with the SHA-256 and the path of each file.

    Raises:
        BadInputError: a folder is named where only files can travel.
    """
    for field, text, put in list(local_files(spec)):
        if is_remote(text) or text.startswith("upload:"):
            continue
        path = Path(text)
        if path.is_dir():
            raise BadInputError(
                f"{field} names the folder {text!r}, and only files travel with a job",
                role="job",
                fix="Convert it to one parquet or JSONL file, or name a path that the service can read",
            )
        if not path.is_file():
            continue
        digest = sha256(path)
        upload(digest, path)
        put(f"upload:{digest}/{file_name(path)}")
    document: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    document.get("resources", {}).pop("runs_dir", None)
    return document


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def file_name(path: Path) -> str:
    """A file's name as the service takes it."""
    name = _SAFE.sub("_", path.name).lstrip(".-_")
    return name[-128:].lstrip(".-_") or f"file{path.suffix}"
