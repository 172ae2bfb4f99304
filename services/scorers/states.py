"""What Serve says of an application, read as one of three states."""

from __future__ import annotations

from typing import Any

# Serve calls a deployment failed also where a replica died before its controller, itself just replaced, had seen all
# replicas well. It then starts another replica, as it does after any death. It gives up for these causes alone.
_GIVEN_UP = {"REPLICA_STARTUP_FAILED", "DEPLOYMENT_ACTOR_FAILED"}


def state_of(status: Any) -> tuple[str, str]:
    """State and cause of one application.

    Args:
        status: Serve's ``ApplicationStatusOverview``, or None where Serve does not know the application.

    Returns:
        ``"ready"`` and nothing; ``"restarting"`` where Serve is still bringing it up, or ``"failed"`` where it will
        not, each with Serve's words.
    """
    if status is None:
        return "failed", "Serve does not know it any more"
    deployments = list(status.deployments.values())
    causes = [deployment.message for deployment in deployments if deployment.status.value != "HEALTHY"]
    cause = "\n".join(filter(None, causes)) or status.message
    if status.status.value == "DELETING":
        return "failed", cause
    if status.status.value == "DEPLOY_FAILED":
        failed = [deployment for deployment in deployments if deployment.status.value == "DEPLOY_FAILED"]
        # An application that failed before it had deployments has nothing that could come back.
        given_up = not failed or any(deployment.status_trigger.value in _GIVEN_UP for deployment in failed)
        return ("failed" if given_up else "restarting"), cause
    if causes or status.status.value != "RUNNING":
        return "restarting", cause
    return "ready", ""
