"""The coordinator as a Ray actor: starts the ranks, watches them, and serves gRPC."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nightshift.wire import listen, telemetry
from nightshift.wire.diagnose import explain
from nightshift.wire.errors import NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.v1 import trainer_pb2_grpc
from services.trainer.config import RankConfig
from services.trainer.coordinator import Coordinator, RankFailedError
from services.trainer.rank_actor import RankActor, environment
from services.trainer.servicer import OPTIONS, TokenCheck, TrainerServicer

_log = logging.getLogger(__name__)
_RESTART = "Start the trainer again and load the newest checkpoint"
#: How long the other ranks may take to come to the same end as one that raised an error.
_GRACE_S = 5.0
_WATCH_S = 1.0
#: Share of a GPU of a single rank: the reference model may lie on the same one.
_GPU_SHARE = 0.25
#: Ray's name for calls to rank 0 beside the training, and how many there may be at once.
_BESIDE, _SERVERS = "beside", 16


class RayRanks:
    """Ranks as Ray actors.

    Attributes:
        world: number of ranks.
        failure: why the ranks cannot go on; None while they can.
    """

    def __init__(self, config: RankConfig, world: int, call_timeout_s: float) -> None:
        self.world = world
        self.failure: RankFailedError | None = None
        self._config = config
        self._timeout_s = call_timeout_s
        self._actors: list[Any] = []
        self._group: Any = None
        self._calls = 0

    async def start(self, timeout_s: float) -> dict[str, Any]:
        """Starts the rank processes and loads the model; returns what rank 0 says of itself.

        Raises:
            BadInputError: the model cannot be loaded.
            RankFailedError: a rank died at its start.
            RoleTimeoutError: the ranks were not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._place()
                return await self._meet()
        except TimeoutError:
            raise RoleTimeoutError(
                f"waited {timeout_s:g} s for {self.world} rank(s) to load the model",
                role="trainer",
                fix="Raise trainer.start_timeout_s, or lower trainer.ranks",
            ) from None

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank; see :class:`services.trainer.coordinator.Ranks`."""
        if self.failure is not None:
            raise self.failure
        self._calls += 1
        try:
            # Large arguments go to shared memory once, not to each rank.
            shared = [ray.put(arg) if isinstance(arg, bytes) else arg for arg in args]
            tasks = [asyncio.ensure_future(_awaited(getattr(actor, method).remote(*shared))) for actor in self._actors]
            return await self._collect(method, tasks)
        finally:
            self._calls -= 1

    async def beside(self, method: str, *args: Any) -> Any:
        """Calls a method of rank 0 beside the others; see :class:`services.trainer.sender.Beside`."""
        if self.failure is not None:
            raise self.failure
        try:
            return await _awaited(getattr(self._actors[0], method).options(concurrency_group=_BESIDE).remote(*args))
        except RayActorError as error:
            raise RankFailedError(f"rank 0 died: {_death(error)}", role="trainer", fix=_RESTART) from error
        except RayTaskError as error:
            if isinstance(error.cause, NightshiftError):
                raise error.cause from None
            raise RoleError(f"rank 0 failed to {method}: {explain(error.cause)}", role="trainer") from error

    async def watch(self) -> None:
        """Notices ranks that die while nothing is asked of them; ends when one has."""
        while self.failure is None:
            await asyncio.sleep(_WATCH_S)
            if self._calls == 0 and self.failure is None:
                try:
                    await self.call("ping")
                except NightshiftError as error:
                    _log.error("%s", error)

    def give_up(self, error: RankFailedError) -> None:
        """See :class:`services.trainer.coordinator.Ranks`."""
        self.failure = error

    def stop(self) -> None:
        """Ends the rank processes."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    async def _place(self) -> None:
        gpus = 0.0 if self._config.device == "cpu" else (_GPU_SHARE if self.world == 1 else 1.0)
        if self._config.role == "critic" and self._config.gpus:
            gpus = 0.0  # it is told its devices, which the policy's ranks may have taken whole in Ray's books
        bundle: dict[str, float] = {"CPU": 1} | ({"GPU": gpus} if gpus else {})
        self._group = placement_group([bundle] * self.world, strategy="PACK")
        await self._group.ready()
        remote = ray.remote(RankActor)
        # Threads beside the one that trains, for as many servers at once.
        sends = self._config.weight_backend == "nccl"
        first = ray.remote(concurrency_groups={_BESIDE: _SERVERS})(RankActor) if sends else remote
        for rank in range(self.world):
            options = (remote if rank else first).options(
                num_cpus=1,
                num_gpus=gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
                runtime_env={"env_vars": environment(self._config, rank, self.world)},
            )
            self._actors.append(options.remote(self._config, rank, self.world))

    async def _meet(self) -> dict[str, Any]:
        places = await self.call("place")
        loopback = len({node for node, *_ in places}) == 1
        folder = Path(tempfile.mkdtemp(prefix="nightshift-ranks-")) if loopback and self.world > 1 else None
        _, address, port, _ = places[0]
        # On one machine the ranks meet in a file: a rendezvous over TCP would listen on every interface.
        init_method = f"file://{folder}/rendezvous" if folder else f"tcp://{address}:{port}"
        try:
            facts = await self.call("setup", init_method, loopback)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return facts[0] | {"pids": [pid for *_, pid in places]}

    async def _collect(self, method: str, tasks: list[asyncio.Future[Any]]) -> list[Any]:
        done, waiting = await asyncio.wait(tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = any(task.exception() for task in done)
        if waiting and failed:
            # The others may be in a collective that this one never joins.
            done, waiting = await asyncio.wait(tasks, timeout=_GRACE_S)
        errors = {rank: task.exception() for rank, task in enumerate(tasks) if task.done() and task.exception()}
        if not errors and not waiting:
            return [task.result() for task in tasks]
        for task in waiting:
            task.cancel()
        raise self._verdict(method, errors, [rank for rank, task in enumerate(tasks) if task in waiting])

    def _verdict(self, method: str, errors: dict[int, Any], hanging: list[int]) -> NightshiftError:
        """The error to raise; ranks that cannot go on are remembered in ``failure``."""
        dead = [rank for rank, error in errors.items() if isinstance(error, RayActorError)]
        if dead:
            during = "while idle" if method == "ping" else f"during {method}"
            why = _death(errors[dead[0]])
            self.failure = RankFailedError(f"rank {dead[0]} died {during}: {why}", role="trainer", fix=_RESTART)
            return self.failure
        if not errors:
            self.failure = RankFailedError(
                f"waited {self._timeout_s:g} s for rank {hanging[0]} to {method}",
                role="trainer",
                fix="Raise trainer.update_timeout_s, or lower the batch",
            )
            return self.failure
        rank, error = next(iter(errors.items()))
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, NightshiftError) and not hanging:
            return cause
        said = str(cause) if isinstance(cause, NightshiftError) else explain(cause)
        self.failure = RankFailedError(f"rank {rank} failed to {method}: {said}", role="trainer", fix=_RESTART)
        return self.failure


class CoordinatorActor:
    """The actor. Created in a process that called ray.init; see :mod:`services.trainer.launch`."""

    def __init__(self, config: RankConfig, settings: dict[str, Any]) -> None:
        self._config = config
        self._settings = settings
        self._ranks: RayRanks | None = None
        self._server: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        """Starts ranks and server.

        Returns:
            ``{"port", "pids"}``, or ``{"error": {"type", "role", "message", "fix"}}``: an error of ours, since Ray
            wraps what is raised.
        """
        try:
            return await self._start()
        except NightshiftError as error:
            await self.stop()
            return {"error": error.to_dict()}

    async def failure(self) -> str:
        """Why the trainer cannot go on; empty while it can."""
        if self._ranks is None or self._server is None:
            return "[trainer] it is not running"
        return str(self._ranks.failure) if self._ranks.failure else ""

    async def stop(self) -> None:
        """Ends server and ranks."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            await self._server.stop(1.0)
            self._server = None
        if self._ranks is not None:
            self._ranks.stop()
        await asyncio.to_thread(telemetry.shutdown)

    async def _start(self) -> dict[str, Any]:
        settings = self._settings
        server = grpc.aio.server(options=OPTIONS, interceptors=[TokenCheck()])
        host = listen.listen_on()
        try:
            port = server.add_insecure_port(f"{host}:{settings['port']}")
        except RuntimeError as error:
            raise RoleError(
                f"port {settings['port']} on {host} is taken",
                role="trainer",
                fix="Set resources.ports.trainer to a free port, or to 0",
            ) from error
        ranks = self._ranks = RayRanks(self._config, settings["ranks"], settings["update_timeout_s"])
        facts = await ranks.start(settings["start_timeout_s"])
        coordinator = Coordinator(
            ranks,
            facts,
            Path(settings["store"]),
            settings["export_dtype"],
            telemetry.setup("trainer", settings["otlp"], settings["run_id"]),
        )
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(TrainerServicer(coordinator), server)
        await server.start()
        self._server = server
        self._watch = asyncio.create_task(ranks.watch(), name="watch the ranks")
        return {"port": port, "pids": facts["pids"]}


async def _awaited(reference: Any) -> Any:
    return await reference


def _death(error: RayActorError) -> str:
    """The cause of an actor's death in one line."""
    if "memory monitor" in str(error):
        return "the machine ran out of memory (lower trainer.micro_batch_size)"
    if isinstance(error, ActorDiedError):
        return "its process ended (killed, out of memory, or crashed)"
    return "its machine cannot be reached"
