"""Starts the trainer on the Ray cluster of this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from nightshift.config import JobSpec
from nightshift.gpu import Placement, find_device
from nightshift.wire.errors import BadInputError, RoleError, RoleTimeoutError
from services.trainer.config import RankConfig
from services.trainer.coordinator_actor import CoordinatorActor

_REPOSITORY = Path(__file__).resolve().parents[2]
_ASK_S = 5.0
_STOP_S = 15.0
#: Beyond the ranks' own deadline: the start of the coordinator's process.
_MARGIN_S = 60.0


class TrainerHandle:
    """A running trainer.

    Attributes:
        url: ``grpc://127.0.0.1:PORT`` of its TrainerService.
        pids: process ids of the ranks, in rank order.
    """

    def __init__(self, actor: Any, url: str, pids: list[int]) -> None:
        self.url = url
        self.pids = pids
        self._actor = actor

    def alive(self) -> bool:
        """Whether coordinator and ranks can go on."""
        return not self.failure()

    def failure(self) -> str:
        """Why they cannot, in one sentence; empty where they can."""
        try:
            return str(ray.get(self._actor.failure.remote(), timeout=_ASK_S))
        except GetTimeoutError:
            return ""  # a busy machine; a dead coordinator answers at once with an error
        except RayError as error:
            return f"[trainer] the coordinator died: {type(error).__name__}"

    def stop(self) -> None:
        """Ends the trainer's processes."""
        try:
            ray.get(self._actor.stop.remote(), timeout=_STOP_S)
        except RayError:
            pass
        finally:
            ray.kill(self._actor, no_restart=True)


def start(
    spec: JobSpec, port: int, store: Path, otlp: str | None, run_id: str, gpus: Placement | None = None
) -> TrainerHandle:
    """Starts coordinator and ranks, and waits until the service answers.

    The process must have called ray.init. ``NIGHTSHIFT_TRAINER_CORES`` (a JSON list) names the ranks' CPU cores.

    Args:
        spec: the resolved job; ``model.path`` is a local folder.
        port: of the gRPC server on 127.0.0.1; 0: any free one.
        store: folder of published weights.
        otlp: OTLP/gRPC endpoint for spans, or None.
        run_id: the run that the trainer belongs to.
        gpus: CUDA devices of the roles; None: what Ray gives.

    Raises:
        BadInputError: the model or a setting cannot be used.
        RoleTimeoutError: not ready within ``trainer.start_timeout_s``.
        RoleError: the port is taken, or a rank failed at its start.
    """
    config = RankConfig.from_spec(spec, find_device(spec.resources.device), gpus)
    settings = {
        "ranks": spec.trainer.ranks,
        "port": port,
        "store": str(store),
        "otlp": otlp,
        "run_id": run_id,
        "export_dtype": spec.checkpoint.export_dtype,
        "start_timeout_s": spec.trainer.start_timeout_s,
        "update_timeout_s": spec.trainer.update_timeout_s,
    }
    remote: Any = ray.remote(CoordinatorActor)
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"}
    actor = remote.options(num_cpus=0, max_restarts=0, runtime_env={"env_vars": variables}).remote(config, settings)
    try:
        outcome = ray.get(actor.start.remote(), timeout=spec.trainer.start_timeout_s + _MARGIN_S)
    except GetTimeoutError as error:
        ray.kill(actor, no_restart=True)
        raise RoleTimeoutError(
            f"waited {spec.trainer.start_timeout_s + _MARGIN_S:g} s for the coordinator to start", role="trainer"
        ) from error
    except RayError as error:
        ray.kill(actor, no_restart=True)
        raise RoleError(f"the coordinator failed at its start: {error}", role="trainer") from error
    if "error" in outcome:
        ray.kill(actor, no_restart=True)
        raise _rebuilt(outcome["error"])
    return TrainerHandle(actor, f"grpc://127.0.0.1:{outcome['port']}", outcome["pids"])


def _rebuilt(values: dict[str, Any]) -> RoleError | BadInputError:
    kinds = {kind.__name__: kind for kind in (BadInputError, RoleTimeoutError)}
    kind = kinds.get(values["type"], RoleError)
    return kind(values["message"], role=values["role"], fix=values["fix"])
