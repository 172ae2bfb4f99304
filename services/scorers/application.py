"""The scorers of a job file as Serve applications, for a Serve configuration (RayService): its ``import_path``.

The job file lies where the replicas run; its reward functions and model paths too. ``nightshift run`` does not use
this: it deploys the same applications itself (:mod:`services.scorers.deploy`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nightshift.config import JobSpec
from nightshift.config.load import load_job
from nightshift.config.rewards import PythonReward
from nightshift.wire.errors import BadInputError
from services.scorers import deploy

_OTLP = "NIGHTSHIFT_OTLP_ENDPOINT"


def reward(arguments: Mapping[str, str]) -> Any:
    """The application of one reward function.

    Args:
        arguments: ``job``, path of the job file; ``name`` of the reward, where the job has several.

    Raises:
        BadInputError: the job has no such Python reward, or its function cannot be used.
    """
    spec = _job(arguments)
    rewards = {r.name or r.function.rpartition(":")[2]: r for r in spec.rewards if isinstance(r, PythonReward)}
    name = arguments.get("name") or next(iter(rewards), "")
    if name not in rewards:
        known = ", ".join(rewards) or "none"
        raise BadInputError(f"the job has no reward function {name!r}", role="reward", fix=f"It has: {known}")
    return deploy._reward(spec, rewards[name], "reward", os.environ.get(_OTLP), spec.name).deployment


def reference(arguments: Mapping[str, str]) -> Any:
    """The application of the reference.

    Args:
        arguments: ``job``, path of the job file.

    Raises:
        BadInputError: there is no model in the folder that the job names.
    """
    spec = _job(arguments)
    return deploy._reference(spec, os.environ.get(_OTLP), spec.name).deployment


def _job(arguments: Mapping[str, str]) -> JobSpec:
    if "job" not in arguments:
        raise BadInputError("the application's args lack 'job', the path of a job file", role="job")
    return load_job(Path(arguments["job"]), [])
