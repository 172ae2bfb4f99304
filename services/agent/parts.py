"""The one place that names the launch modules of the other services; tests put others in their place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from nightshift.config.job import JobSpec
from nightshift.gpu import Device, Placement
from nightshift.wire.errors import BadInputError
from services.agent.cluster import RayCluster
from services.agent.rollout_role import Server
from services.rollout.launch import VllmServer, free_port, port_is_free

#: Logical CPUs of Ray beyond the trainer's ranks: its coordinator, Serve, and one to spare.
_MORE_CPUS = 3


class Cluster(Protocol):
    """What is needed of :class:`services.agent.cluster.RayCluster`."""

    metrics: list[str]

    def start(self) -> None: ...
    def failure(self) -> str: ...
    def stop(self) -> None: ...


class WeightServer(Protocol):
    """What is needed of :class:`services.trainer.weight_server.WeightServer`."""

    url: str
    token: str

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Trainer(Protocol):
    """What :func:`services.trainer.launch.start` returns."""

    url: str

    def failure(self) -> str: ...
    def stop(self) -> None: ...


class Parts:
    """Starts the real services."""

    def port(self, role: str, wanted: int) -> int:
        """The port of a role on loopback: the wanted one, or any free one where that is 0.

        Raises:
            BadInputError: it is taken.
        """
        if wanted and not port_is_free(wanted):
            fix = f"Set resources.ports.{role} to a free port, or to 0 for any free one"
            raise BadInputError(f"port {wanted} is taken", role=role, fix=fix)
        return wanted or free_port()

    def server(
        self,
        spec: JobSpec,
        *,
        name: str,
        store: Path | None,
        log_path: Path,
        device: Device,
        cores: tuple[int, ...],
        gpu: int | None,
        port: int,
        otlp: str | None,
        weight_backend: str,
        weights_url: str | None,
        cache: Path,
    ) -> Server:
        """A vLLM server that has not been started.

        Raises:
            BadInputError: there is no model, or the port is taken.
        """
        server = VllmServer(
            spec,
            name=name,
            store=store,
            log_path=log_path,
            device=device,
            cores=cores,
            gpu=gpu,
            port=port,
            otlp=otlp,
            weight_backend=weight_backend,
            weights_url=weights_url,
            cache=cache,
        )
        server.check_port()
        return server

    def weight_server(self, store: Path, host: str, port: int) -> WeightServer:
        """A server of the published weights that has not been started.

        Raises:
            RoleError: the port is taken.
        """
        from services.trainer.weight_server import WeightServer as Files

        return Files(store, host, port)

    def cluster(self, spec: JobSpec, run_dir: Path, environment: dict[str, str], gpus: Placement | None) -> Cluster:
        """A Ray cluster that has not been started; without ``gpus`` it has no CUDA devices to give."""
        from services.scorers.ingress import RAY_ENVIRONMENT

        return RayCluster(
            run_dir,
            cpus=spec.trainer.ranks + (spec.scorers.critic.ranks if spec.scorers.critic else 0) + _MORE_CPUS,
            gpus=1 + max((gpus.rollout, *gpus.trainer)) if gpus else 0,
            object_store_mib=spec.resources.ray_object_store_mib,
            environment={**RAY_ENVIRONMENT, **environment},
        )

    def deploy(self, spec: JobSpec, port: int, otlp: str | None, run_id: str) -> dict[str, Any]:
        """Deploys the scorers; see :func:`services.scorers.deploy.deploy`."""
        from services.scorers.deploy import deploy

        return deploy(spec, port, otlp, run_id)

    def undeploy(self) -> None:
        """Ends the scorers and Serve."""
        from services.scorers.deploy import undeploy

        undeploy()

    def scorer_states(self, applications: Iterable[str]) -> dict[str, tuple[str, str]]:
        """State ("ready", "restarting" or "failed") and cause of each Serve application."""
        names = list(applications)
        if not names:
            return {}
        from ray import serve

        from services.scorers.states import state_of

        known = serve.status().applications
        return {name: state_of(known.get(name)) for name in names}

    def trainer(
        self, spec: JobSpec, port: int, store: Path, otlp: str | None, run_id: str, gpus: Placement | None
    ) -> Trainer:
        """Starts the trainer and waits until it answers; see :func:`services.trainer.launch.start`."""
        from services.trainer.launch import start

        return start(spec, port, store, otlp, run_id, gpus)
