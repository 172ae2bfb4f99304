"""What the shell may complete beyond commands and options: jobs, runs, states, scopes, settings and keys of a job file.

Called by the shell at each press of the key: whatever goes wrong completes nothing, and a service that does not answer
within a second is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

_TIMEOUT_S = 1.0
_MOST = 50
SCOPES = ("read", "submit", "code", "admin")
STATES = ("queued", "starting", "running", "paused", "resuming", "cancelling", "succeeded", "failed", "cancelled")


def jobs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest jobs of the service, with their states."""
    from nightshift.client import Client
    from nightshift.wire.errors import NightshiftError

    url = context.params.get("url")
    try:
        with Client(url, timeout_s=_TIMEOUT_S, tries=1) as client:
            page = client.jobs(page=_MOST)
            found = [(job.id, job.state) for job, _ in zip(page, range(_MOST), strict=False)]
    except (NightshiftError, OSError, ValueError):
        return []
    return [(name, state) for name, state in found if name.startswith(incomplete)]


def runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest runs below the folder of runs; of jobs, where a service is named."""
    from nightshift.cli.runs import list_runs

    if context.params.get("url"):
        return jobs(context, incomplete)
    try:
        found = list_runs(Path(context.params.get("runs_dir") or "runs"))
    except OSError:
        return []
    return [(run.name, "") for run in found[:_MOST] if run.name.startswith(incomplete)]


def states(incomplete: str) -> list[str]:
    """States of a job."""
    return [name for name in STATES if name.startswith(incomplete)]


def scopes(incomplete: str) -> list[str]:
    """Scopes of a token."""
    return [name for name in SCOPES if name.startswith(incomplete)]


def settings(incomplete: str) -> list[tuple[str, str]]:
    """Live settings, ready for their value."""
    from nightshift.config.live import ALIASES, LIVE

    names = {**LIVE, **{alias: LIVE[key] for alias, key in ALIASES.items()}, "use_async_rollout": ""}
    return [(f"{name}=", when) for name, when in names.items() if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Keys of a job file, ready for their value."""
    return [f"{key}=" for key in _keys() if key.startswith(incomplete)]


def _keys() -> Iterator[str]:
    from nightshift.config import JobSpec
    from nightshift.config.suggest import models_of

    for section, field in JobSpec.model_fields.items():
        models = models_of(field.annotation)
        if not models:
            yield section
        elif section != "rewards":  # a list, which has no keys of its own
            yield from (f"{section}.{name}" for model in models for name in model.model_fields)
