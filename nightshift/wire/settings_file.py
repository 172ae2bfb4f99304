"""The two files by which a job's live settings travel: what was asked for, and what is in force.

``settings.json`` is written by whoever changes a setting, ``settings.applied.json`` by the runner; both by rename.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASKED, APPLIED = "settings.json", "settings.applied.json"


def read_settings(path: Path) -> dict[str, Any]:
    """Key -> value; empty where there is no such file or it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_settings(path: Path, values: Mapping[str, Any]) -> None:
    """Writes values by rename."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(dict(values)), encoding="utf-8")
    part.replace(path)


def asked_for(run_dir: Path) -> dict[str, Any]:
    """Settings that were asked for since the job began."""
    return read_settings(run_dir / ASKED)


def in_force(run_dir: Path) -> dict[str, Any]:
    """Settings that were changed and took effect."""
    return read_settings(run_dir / APPLIED)
