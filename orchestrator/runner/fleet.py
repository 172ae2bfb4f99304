"""The rollout servers of a run: which may be used, which weights they hold, and requests that outlive one of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from nightshift.wire.errors import NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.events import EventLog
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.engine import (
    Engine,
    EngineAddress,
    EngineAwayError,
    Generated,
    GenerateRequest,
    InvalidAnswerError,
)
from orchestrator.runner.trainer import Publication


class ServerState(StrEnum):
    """Health of one server. There is no way from ``SUSPECT`` or ``STALE`` to ``HEALTHY`` without a verified push."""

    STALE = "stale"  # weights unknown, or not the published ones
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # a request failed; checked before it gets work again


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Mean |difference| of log-probs between server and trainer, in nats per token.

    Attributes:
        largest: above it the server does not hold the published weights.
        resolution: below it two policies cannot be told apart by the probe.
    """

    largest: float
    resolution: float


#: Measured: a float32 server agrees with the trainer to 1e-5; a bfloat16 one is off by 0.03 to 0.04 in the mean.
PROBE_LIMITS = {"float32": ProbeLimits(2e-3, 5e-5), "bfloat16": ProbeLimits(0.15, 0.08)}


class Server:
    """One server and what the run knows of it."""

    def __init__(self, address: EngineAddress, request_timeout_s: float) -> None:
        self.engine = Engine(address, request_timeout_s)
        self.state = ServerState.STALE
        self.version = ""
        self.running = 0
        self.initialised = False
        self.probe: np.ndarray | None = None

    @property
    def name(self) -> str:
        """Name in logs and metrics."""
        return self.engine.address.name


class Fleet:
    """Routes requests to the least loaded healthy server, and keeps every server on the published weights.

    Args:
        probe_inputs: sequences whose log-probs prove that weights arrived.
        limits: how near server and trainer must be on them.
        refresh: reads the current addresses; a changed incarnation is a restarted server.
        drain: wait for running requests before a push, instead of updating under them.
    """

    def __init__(
        self,
        addresses: list[EngineAddress],
        *,
        events: EventLog,
        refresh: Callable[[], list[EngineAddress] | None],
        probe_inputs: list[SequenceInput],
        limits: ProbeLimits,
        request_timeout_s: float,
        away_s: float,
        retries: int,
        drain: bool = False,
    ) -> None:
        self._events = events
        self._refresh = refresh
        self._probe_inputs = probe_inputs
        self._limits = limits
        self._request_timeout_s = request_timeout_s
        self._away_s = away_s
        self._retries = retries
        self._mode = "wait" if drain else "keep"
        self._servers = {address.name: Server(address, request_timeout_s) for address in addresses}
        self._published: Publication | None = None
        self._previous_probe: np.ndarray | None = None
        self._changed = asyncio.Condition()
        self._watcher: asyncio.Task[None] | None = None
        self._push_lock = asyncio.Lock()
        self.rejected: Counter[str] = Counter()
        self.pause_seconds = 0.0
        self._turnstile: asyncio.Lock | None = None
        self._sent = 0

    @property
    def running(self) -> int:
        """Requests on all servers."""
        return sum(server.running for server in self._servers.values())

    @property
    def servers(self) -> list[Server]:
        """All servers known now."""
        return list(self._servers.values())

    def start(self) -> None:
        """Begins to watch for restarted servers."""
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stops watching and closes all connections."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for server in self._servers.values():
            await server.engine.close()

    async def generate(self, request: GenerateRequest) -> Generated:
        """Draws one sample, on another server or later where one fails.

        An attempt that was given up never counts: its answer goes to a closed connection, and the next attempt has a
        request id of its own.

        Raises:
            InvalidAnswerError: unusable answers, one more than the retries.
            EngineRefusedError: the request itself is refused.
            RoleTimeoutError: no server for as long as a role may be away.
        """
        deadline = time.monotonic() + self._away_s
        attempt, pause = 0, 0.1
        while True:
            server = await self._acquire(deadline)
            try:
                server.running += 1
                return await self._send(server, replace(request, request_id=f"{request.request_id}.{attempt}"))
            except InvalidAnswerError as error:
                self.rejected[error.kind] += 1
                if attempt >= self._retries:
                    raise
            except (EngineAwayError, RoleTimeoutError) as error:
                self._suspect(server, error)
                if time.monotonic() + pause > deadline:
                    raise RoleTimeoutError(
                        f"{request.request_id} had no answer for {self._away_s:g} s; last: {error.message}",
                        role="rollout",
                    ) from error
            finally:
                server.running -= 1
            attempt += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def publish(self, publication: Publication) -> float:
        """Brings every reachable server to the published weights and proves it; returns the longest pause in seconds.

        A server that fails is left out until it holds the weights; the push itself fails where none is left.

        Raises:
            RoleError: the weights did not arrive on any server.
        """
        async with self._push_lock:
            self._previous_probe = _values(self._published) if self._published else None
            self._published = publication
            results = await asyncio.gather(*(self._bring(server) for server in self.servers), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) == len(results):
            unexpected = next((error for error in errors if not isinstance(error, NightshiftError)), None)
            raise unexpected or errors[0]
        return max(result for result in results if isinstance(result, float))

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Holds all servers: requests sent meanwhile go out one after the other and are queued in that order."""
        await asyncio.gather(*(server.engine.pause() for server in self.servers))
        self._turnstile, self._sent = asyncio.Lock(), 0
        try:
            yield
        finally:
            self._turnstile = None
            await asyncio.gather(*(server.engine.resume() for server in self.servers))

    async def wait_sent(self, requests: int) -> None:
        """Waits until so many requests were sent since the servers are held.

        Raises:
            RoleTimeoutError: they were not sent within the time that a role may be away.
        """
        deadline = time.monotonic() + self._away_s
        while self._sent < requests:
            if time.monotonic() > deadline:
                raise RoleTimeoutError(
                    f"{self._sent} of {requests} requests were sent in {self._away_s:g} s", role="rollout"
                )
            await asyncio.sleep(0.005)

    async def _send(self, server: Server, request: GenerateRequest) -> Generated:
        if self._turnstile is None:
            return await server.engine.generate(request)
        sent = asyncio.Event()
        async with self._turnstile:
            answer = asyncio.create_task(server.engine.generate(request, on_sent=sent.set))
            waiter = asyncio.create_task(sent.wait())
            await asyncio.wait({answer, waiter}, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            # The server reads its connections in the order in which data arrives: leave it time for this one.
            await asyncio.sleep(0.002)
            self._sent += 1
        return await answer

    async def _bring(self, server: Server) -> float:
        publication = self._published
        if publication is None:
            return 0.0
        before = server.probe if server.version else None
        server.state = ServerState.STALE
        if not server.initialised:
            await server.engine.init_transfer(server.engine.address.init_info)
            server.initialised = True
        pause = await server.engine.push(publication.update_info, publication.version, mode=self._mode)
        await self._prove(server, publication, before)
        server.version = publication.version
        server.state = ServerState.HEALTHY
        self.pause_seconds = pause
        await self._notify()
        return pause

    async def _prove(self, server: Server, publication: Publication, before: np.ndarray | None) -> None:
        scores = [await server.engine.score(item["prompt_ids"], item["response_ids"]) for item in self._probe_inputs]
        held = np.concatenate(scores) if scores else np.zeros(0, np.float32)
        expected = _values(publication)
        if not len(held):
            return
        error = float(np.abs(held - expected).mean())
        moved = (
            0.0
            if before is None or self._previous_probe is None
            else float(np.abs(expected - self._previous_probe).mean())
        )
        # A push that did nothing leaves an error as large as the step between the two policies.
        unmoved = moved > 2 * self._limits.resolution and error > 0.5 * moved
        if error > self._limits.largest or unmoved:
            raise RoleError(
                f"{server.name} does not compute with the weights of {publication.version}: its log-probs are "
                f"{error:.2g} nats per token from the trainer's, where the update itself changed them by {moved:.2g}",
                role="rollout",
                fix="The push reported success but the weights did not arrive; see the server's log",
            )
        server.probe = held

    def _suspect(self, server: Server, error: NightshiftError) -> None:
        if server.state is ServerState.HEALTHY:
            server.state = ServerState.SUSPECT
            self._events.append("role", role="rollout", state="suspect", detail=f"{server.name}: {error.message}")

    async def _acquire(self, deadline: float) -> Server:
        async with self._changed:
            while True:
                healthy = [server for server in self.servers if server.state is ServerState.HEALTHY]
                if healthy:
                    return min(healthy, key=lambda server: server.running)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RoleTimeoutError(f"no rollout server was usable for {self._away_s:g} s", role="rollout")
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    continue

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            try:
                await self._look()
            except NightshiftError as error:
                self._events.append("warning", role=error.role or "rollout", message=error.message)

    async def _look(self) -> None:
        for address in self._refresh() or []:
            known = self._servers.get(address.name)
            if known is None or known.engine.address.incarnation != address.incarnation:
                if known is not None:
                    await known.engine.close()
                fresh = Server(address, self._request_timeout_s)
                fresh.running = known.running if known is not None else 0
                self._servers[address.name] = fresh
        for server in self.servers:
            if server.state is ServerState.HEALTHY or self._push_lock.locked() or self._published is None:
                continue
            if not await server.engine.healthy():
                continue
            began = time.monotonic()
            async with self._push_lock:
                await self._bring(server)
            self._events.append(
                "role",
                role="rollout",
                state="ready",
                detail=f"{server.name} holds {server.version} again",
                seconds=time.monotonic() - began,
            )


def _values(publication: Publication | None) -> np.ndarray:
    if publication is None or not publication.probe:
        return np.zeros(0, np.float32)
    return np.concatenate([np.asarray(item["logprobs"], dtype=np.float32) for item in publication.probe])
