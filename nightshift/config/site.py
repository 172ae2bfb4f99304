"""What an installation knows and its jobs need not say: which hosts run the roles that a job leaves open.

=============================  ======================================================================
``NIGHTSHIFT_TRAINER_AGENT``   ``resources.agents.trainer``
``NIGHTSHIFT_SCORERS_AGENT``   ``resources.agents.scorers``
``NIGHTSHIFT_ROLLOUT_URLS``    ``rollout.url``, separated by spaces
``NIGHTSHIFT_OTLP_HOST``       ``resources.otlp_host``
``NIGHTSHIFT_WEIGHTS_AT``      ``resources.weight_host`` and ``resources.ports.weights``, as host:port
=============================  ======================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import ValidationError

from nightshift.config.job import JobSpec
from nightshift.wire.errors import BadInputError

TRAINER, SCORERS = "NIGHTSHIFT_TRAINER_AGENT", "NIGHTSHIFT_SCORERS_AGENT"
ROLLOUT, OTLP, WEIGHTS = "NIGHTSHIFT_ROLLOUT_URLS", "NIGHTSHIFT_OTLP_HOST", "NIGHTSHIFT_WEIGHTS_AT"


def with_site(spec: JobSpec, environment: Mapping[str, str] = os.environ) -> JobSpec:
    """The job with what the environment says of this installation; what the job says itself stays.

    Raises:
        BadInputError: the two do not go together, or a value of the environment is none.
    """
    if not any(environment.get(name) for name in (TRAINER, SCORERS, ROLLOUT, OTLP, WEIGHTS)):
        return spec
    values = spec.model_dump(mode="python")
    resources, agents = values["resources"], values["resources"]["agents"]
    if environment.get(ROLLOUT, "").split() and spec.rollout.own_servers and not spec.is_preference:
        values["rollout"]["url"] = environment[ROLLOUT].split()
    for role, name in (("trainer", TRAINER), ("scorers", SCORERS)):
        agents[role] = agents[role] or environment.get(name) or None
    if environment.get(OTLP) and "otlp_host" not in spec.resources.model_fields_set:
        resources["otlp_host"] = environment[OTLP]
    if (at := environment.get(WEIGHTS, "")) and not resources["ports"]["weights"] and not agents["trainer"]:
        resources["weight_host"], _, port = at.rpartition(":")
        resources["ports"]["weights"] = port
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        said = "; ".join(str(problem["msg"]).removeprefix("Value error, ") for problem in error.errors())
        raise BadInputError(
            f"the job does not fit this installation: {said}",
            role="job",
            fix=f"See {TRAINER}, {SCORERS} and {ROLLOUT} in its environment",
        ) from error
