"""Folders that appear whole: written under another name, synced, renamed. No torch."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from nightshift.wire.errors import BadInputError

MANIFEST = "manifest.json"


def temporary(target: Path) -> Path:
    """Makes an empty folder beside ``target``, on the same file system."""
    path = target.parent / f".{target.name}.tmp-{secrets.token_hex(4)}"
    path.mkdir(parents=True)
    return path


def commit(partial: Path, target: Path, manifest: dict[str, Any] | None = None) -> int:
    """Makes a written folder appear under its name.

    Args:
        partial: the folder as written.
        target: its name; a folder already there (of an earlier try at the same save) is replaced.
        manifest: written as manifest.json after everything else, if given.

    Returns:
        Bytes of all files.
    """
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            _sync(path)
    if manifest is not None:
        path = partial / MANIFEST
        path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        _sync(path)
    size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    if target.exists():
        old = target.parent / f".{target.name}.old-{secrets.token_hex(4)}"
        target.replace(old)
        partial.replace(target)
        shutil.rmtree(old)
    else:
        partial.replace(target)
    _sync(target.parent)
    return size


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a resume state.

    Raises:
        BadInputError: there is none, so the folder is not a whole resume state; or it is not a JSON object.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInputError(
            f"{folder} has no {MANIFEST}, so it is not a whole resume state", role="trainer", fix="Choose an older one"
        ) from None
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON: {error}", role="trainer", fix="Choose an older checkpoint") from error
    if not isinstance(manifest, dict):
        raise BadInputError(f"{path} holds no JSON object", role="trainer", fix="Choose an older checkpoint")
    return manifest


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
