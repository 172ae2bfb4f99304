"""Starts the trainer on the Ray cluster of this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from nightshift.config import JobSpec
from nightshift.gpu import Placement, find_device
from nightshift.wire import listen
from nightshift.wire.errors import BadInputError, RoleError, RoleTimeoutError
from services.trainer.config import RankConfig
from services.trainer.coordinator_actor import CoordinatorActor

_REPOSITORY = Path(__file__).resolve().parents[2]
#: Folder of the critic's published weights, below that of the policy's.
CRITIC_STORE = "critic"
_ASK_S = 5.0
_STOP_S = 15.0
#: Beyond the ranks' own deadline: the start of the coordinator's process.
_MARGIN_S = 60.0


class TrainerHandle:
    """A running trainer, with that of the critic where the job has one: they live and end together, since the weights
    of one belong to a step of the other.

    Attributes:
        url: ``grpc://host:port`` of its TrainerService.
        pids: process ids of the ranks, in rank order, those of the critic last.
        critic_url: the same of the critic's trainer; empty without one.
    """

    def __init__(self, actors: list[Any], url: str, pids: list[int], critic_url: str = "") -> None:
        self.url = url
        self.pids = pids
        self.critic_url = critic_url
        self._actors = actors

    def alive(self) -> bool:
        """Whether coordinator and ranks can go on."""
        return not self.failure()

    def failure(self) -> str:
        """Why they cannot, in one sentence; empty where they can."""
        try:
            answers = ray.get([actor.failure.remote() for actor in self._actors], timeout=_ASK_S)
            return next((str(answer) for answer in answers if answer), "")
        except GetTimeoutError:
            return ""  # a busy machine; a dead coordinator answers at once with an error
        except RayError as error:
            return f"[trainer] the coordinator died: {type(error).__name__}"

    def stop(self) -> None:
        """Ends the trainer's processes."""
        for actor in self._actors:
            try:
                ray.get(actor.stop.remote(), timeout=_STOP_S / len(self._actors))
            except RayError:
                pass
            finally:
                ray.kill(actor, no_restart=True)


def start(
    spec: JobSpec, port: int, store: Path, otlp: str | None, run_id: str, gpus: Placement | None = None
) -> TrainerHandle:
    """Starts coordinator and ranks, and waits until the service answers.

    The process must have called ray.init. ``NIGHTSHIFT_TRAINER_CORES`` (a JSON list) names the ranks' CPU cores.

    Args:
        spec: the resolved job; ``model.path`` is a local folder.
        port: of the gRPC server; 0: any free one.
        store: folder of published weights.
        otlp: OTLP/gRPC endpoint for spans, or None.
        run_id: the run that the trainer belongs to.
        gpus: CUDA devices of the roles; None: what Ray gives.

    Raises:
        BadInputError: the model or a setting cannot be used.
        RoleTimeoutError: not ready within ``trainer.start_timeout_s``.
        RoleError: the port is taken, or a rank failed at its start.
    """
    device = find_device(spec.resources.device)
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
    parts = [(RankConfig.from_spec(spec, device, gpus), settings)]
    if spec.scorers.critic is not None:
        own = {"ranks": spec.scorers.critic.ranks, "port": 0, "store": str(store / CRITIC_STORE), "export_dtype": None}
        parts.append((RankConfig.for_critic(spec, device, gpus), settings | own))
    remote: Any = ray.remote(CoordinatorActor)
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"}
    for name in (listen.HOST_VARIABLE, listen.TOKEN_VARIABLE):  # the nodes of a cluster do not share our environment
        variables |= {name: os.environ[name]} if name in os.environ else {}
    options = remote.options(num_cpus=0, max_restarts=0, runtime_env={"env_vars": variables})
    actors = [options.remote(config, own) for config, own in parts]
    timeout_s = spec.trainer.start_timeout_s + _MARGIN_S
    try:
        outcomes = ray.get([actor.start.remote() for actor in actors], timeout=timeout_s)
        for outcome in outcomes:
            if "error" in outcome:
                raise _rebuilt(outcome["error"])
    except BaseException as error:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if isinstance(error, GetTimeoutError):
            message = f"waited {timeout_s:g} s for the coordinator to start"
            raise RoleTimeoutError(message, role="trainer") from error
        if isinstance(error, RayError):
            raise RoleError(f"the coordinator failed at its start: {error}", role="trainer") from error
        raise
    urls = [f"grpc://{listen.reached_as()}:{outcome['port']}" for outcome in outcomes]
    pids = [pid for outcome in outcomes for pid in outcome["pids"]]
    return TrainerHandle(actors, urls[0], pids, urls[1] if len(urls) > 1 else "")


def _rebuilt(values: dict[str, Any]) -> RoleError | BadInputError:
    kinds = {kind.__name__: kind for kind in (BadInputError, RoleTimeoutError)}
    kind = kinds.get(values["type"], RoleError)
    return kind(values["message"], role=values["role"], fix=values["fix"])
