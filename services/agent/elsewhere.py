"""Roles of a run that somebody else runs behind a URL, as ``services.json`` lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from nightshift.config import JobSpec
from nightshift.config.rewards import RemoteReward
from nightshift.config.scorers import REMOTE
from nightshift.config.site import ROLLOUT


def external_server(at: int, url: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """A rollout server that somebody else runs.

    Where the installation names its servers, its token goes to these alone, and not to others that a job names.
    """
    own = environment.get(ROLLOUT, "").split()
    return {
        "name": f"rollout-{at}",
        "url": url,
        "token": environment.get("NIGHTSHIFT_ROLLOUT_TOKEN", "") if not own or url in own else "",
        "incarnation": "external",
        "weight_backend": "safetensors",
        "pid": 0,
    }


def scored_elsewhere(spec: JobSpec) -> dict[str, Any] | None:
    """The scorers' part of ``services.json`` where the job names every scorer by URL; None where one is started here.

    Then neither Ray nor Serve is needed: the image of the orchestrator has neither.
    """
    if spec.scorers.critic is not None:
        return None
    entries: dict[str, Any] = {"rewards": [], "reference": None, "teacher": None, "critic": None}
    for reward in spec.rewards:
        if not isinstance(reward, RemoteReward):
            return None
        application = "reward-" + re.sub(r"[^A-Za-z0-9._-]", "_", reward.name)
        entries["rewards"].append({"name": reward.name, "url": reward.url, "application": application})
    models = {
        "reference": (spec.scorers.reference.model or "") if spec.needs_reference else None,
        "teacher": spec.scorers.teacher.model if spec.scorers.teacher and spec.needs_teacher else None,
    }
    for role, model in models.items():
        if model is None:
            continue
        if not model.startswith(REMOTE):
            return None
        entries[role] = {"url": model, "application": role}
    return entries
