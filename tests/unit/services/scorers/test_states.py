"""Serve's words on an application, read as ready, restarting or failed."""

import pytest
from ray.serve._private.common import (
    DeploymentStatus,
    DeploymentStatusInternalTrigger,
    DeploymentStatusTrigger,
)
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from services.scorers.states import state_of


def deployment(
    status: str, message: str = "", trigger: str = "HEALTH_CHECK_FAILED"
) -> dict[str, DeploymentStatusOverview]:
    overview = DeploymentStatusOverview(DeploymentStatus(status), DeploymentStatusTrigger(trigger), {}, message)
    return {"reference": overview}


def application(status: str, deployments: dict[str, DeploymentStatusOverview], message: str = "") -> object:
    return ApplicationStatusOverview(ApplicationStatus(status), message, 0.0, deployments)


def test_an_application_of_well_replicas_is_ready():
    assert state_of(application("RUNNING", deployment("HEALTHY"))) == ("ready", "")


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (application("RUNNING", deployment("UNHEALTHY", "a replica died")), ("restarting", "a replica died")),
        (application("DEPLOYING", deployment("UPDATING")), ("restarting", "")),
        (application("UNHEALTHY", deployment("UNHEALTHY"), "unhealthy"), ("restarting", "unhealthy")),
        (application("DELETING", deployment("UPDATING"), "deleted"), ("failed", "deleted")),
        (application("DEPLOY_FAILED", {}, "no such module"), ("failed", "no such module")),
        (None, ("failed", "Serve does not know it any more")),
    ],
)
def test_other_states(status, found):
    assert state_of(status) == found


def test_a_replica_that_died_while_its_controller_was_new_is_coming_back():
    """The controller calls this failed, and starts another replica nonetheless."""
    status = application("DEPLOY_FAILED", deployment("DEPLOY_FAILED", "a health check failed"), "Failed to update")
    assert state_of(status) == ("restarting", "a health check failed")


@pytest.mark.parametrize("trigger", ["REPLICA_STARTUP_FAILED", "DEPLOYMENT_ACTOR_FAILED"])
def test_replicas_that_cannot_start_have_failed(trigger):
    status = application("DEPLOY_FAILED", deployment("DEPLOY_FAILED", "died three times", trigger), "Failed to update")
    assert state_of(status) == ("failed", "died three times")


def test_serve_moves_on_from_a_death_during_an_update():
    """What is relied on: in this release, such a deployment is called failed, and well again once a replica is."""
    from ray.serve._private.common import DeploymentStatusInfo

    status = DeploymentStatusInfo("reference", DeploymentStatus.UPDATING, DeploymentStatusTrigger.UNSPECIFIED)
    status = status.handle_transition(DeploymentStatusInternalTrigger.HEALTH_CHECK_FAILED, "died")
    assert (status.status.value, status.status_trigger.value) == ("DEPLOY_FAILED", "HEALTH_CHECK_FAILED")
    status = status.handle_transition(DeploymentStatusInternalTrigger.HEALTHY, "")
    assert status.status.value == "HEALTHY"
