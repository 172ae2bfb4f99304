"""The rollout servers of a run: which may be used, which weights they hold, and requests that outlive one of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace

import numpy as np

from nightshift.wire.errors import NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.events import EventLog
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.answers import (
    EngineAwayError,
    EngineRefusedError,
    Generated,
    GenerateRequest,
    InvalidAnswerError,
)
from orchestrator.runner.engine import Engine, EngineAddress
from orchestrator.runner.health import Health, ProbeLimits, probe_failure
from orchestrator.runner.prefix import completed, join, rest
from orchestrator.runner.trainer import Publication

#: Seconds between two looks at the servers.
_LOOK_S = 0.5


class Server:
    """One server and what the run knows of it."""

    def __init__(self, address: EngineAddress, request_timeout_s: float, flush_tokens: int = 0) -> None:
        self.engine = Engine(address, request_timeout_s, flush_tokens)
        self.health = Health()
        self.running = 0
        self.initialised = False
        self.error = ""  # why it was last left out

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
        flush_tokens: tokens after which servers send a part of a response. What came in of one that broke off is kept,
            and only the rest is drawn again; 0: responses are drawn whole or not at all.
        max_staleness: versions between a kept token and the published weights, above which it is not kept; None: any.
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
        flush_tokens: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        self._events = events
        self._refresh = refresh
        self._probe_inputs = probe_inputs
        self._limits = limits
        self._request_timeout_s = request_timeout_s
        self._away_s = away_s
        self._retries = retries
        self._mode = "wait" if drain else "keep"
        self._flush_tokens = flush_tokens
        self._max_staleness = max_staleness
        self._servers = {address.name: Server(address, request_timeout_s, flush_tokens) for address in addresses}
        self._published: Publication | None = None
        self._versions: dict[str, int] = {}  # published by this process, in their order
        self._previous_probe: np.ndarray | None = None
        self._changed = asyncio.Condition()
        self._watcher: asyncio.Task[None] | None = None
        self._push_lock = asyncio.Lock()
        self._rejected: Counter[str] = Counter()
        self._kept_tokens = 0
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

    def take_rejected(self) -> Counter[str]:
        """Answers that were refused since the last call, by kind."""
        rejected, self._rejected = self._rejected, Counter()
        return rejected

    def take_kept(self) -> int:
        """Tokens of responses that broke off and were kept, since the last call."""
        kept, self._kept_tokens = self._kept_tokens, 0
        return kept

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

    async def generate(
        self, request: GenerateRequest, retry_span: Callable[[int], AbstractContextManager[str]] | None = None
    ) -> Generated:
        """Draws one sample, on another server or later where one fails.

        An attempt that was given up never counts: its answer goes to a closed connection, and the next attempt has a
        request id of its own. What had come in before it broke off counts, and the next attempt goes on behind it.

        Args:
            request: what to draw.
            retry_span: opens the span of a further attempt, numbered from 1, and gives its traceparent.

        Raises:
            InvalidAnswerError: unusable answers, one more than the retries.
            EngineRefusedError: the request itself is refused.
            RoleTimeoutError: no server for as long as a role may be away.
        """
        deadline = time.monotonic() + self._away_s
        attempt, pause = 0, 0.1
        prefix: Generated | None = None
        while True:
            server = await self._acquire(deadline)
            if prefix is not None and self._too_old(prefix):
                prefix = None
            server.running += 1
            span = retry_span(attempt) if retry_span and attempt else nullcontext(request.traceparent)
            held = server.health.version
            try:
                with span as traceparent:
                    part = rest(request, prefix)
                    named = replace(part, request_id=f"{part.request_id}.{attempt}", traceparent=traceparent)
                    return join(prefix, await self._send(server, named))
            except EngineRefusedError:
                if prefix is None:
                    raise
                prefix = None  # a context that is full, for instance: the whole is asked for once more
            except InvalidAnswerError as error:
                self._rejected[error.kind] += 1
                if attempt >= self._retries:
                    raise
                prefix = self._keep(prefix, error.partial, held)
            except (EngineAwayError, RoleTimeoutError) as error:
                self._suspect(server, error)
                prefix = self._keep(prefix, getattr(error, "partial", None), held)
                if time.monotonic() + pause > deadline:
                    raise RoleTimeoutError(
                        f"{request.request_id} had no answer for {self._away_s:g} s; last: {error.message}",
                        role="rollout",
                    ) from error
            finally:
                server.running -= 1
            if prefix is not None and (whole := completed(request, prefix)) is not None:
                return whole
            attempt += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def publish(self, publication: Publication) -> float:
        """Brings every reachable server to the published weights and proves it; returns the longest pause in seconds.

        A server that fails is left out until it holds the weights. Where none is left, a server that went away is
        waited for; one that answers and does not take the weights fails the push.

        Raises:
            RoleError: the weights did not arrive on any server.
        """
        async with self._push_lock:
            self._previous_probe = _values(self._published) if self._published else None
            self._published = publication
            self._versions.setdefault(publication.version, len(self._versions))
            servers = self.servers
            results = await asyncio.gather(*(self._bring(server) for server in servers), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if unexpected := next((error for error in errors if not isinstance(error, NightshiftError)), None):
            raise unexpected
        if len(errors) < len(results):
            for error in errors:
                self._events.append("warning", role="rollout", message=f"left out until it holds the weights: {error}")
            return max(result for result in results if isinstance(result, float))
        for server, error in zip(servers, errors, strict=True):
            if not await self._went_away(server, error):
                raise error
        return await self._wait_for_return(publication, errors[0])

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Holds all servers: requests sent meanwhile go out one after the other and are queued in that order.

        Raises:
            RoleTimeoutError: no server could be held within the time that a role may be away.
        """
        deadline = time.monotonic() + self._away_s
        paused: list[Server] = []
        while not paused:
            await self._acquire(deadline)
            paused = [server for server in self._usable() if await self._try(server, server.engine.pause)]
        self._turnstile, self._sent = asyncio.Lock(), 0
        try:
            yield
        finally:
            self._turnstile = None
            for server in paused:
                await self._try(server, server.engine.resume)

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
        oldest = self._versions.get(server.health.version, 0)
        if self._turnstile is None:
            return self._check_versions(server, await server.engine.generate(request), oldest)
        sent = asyncio.Event()
        async with self._turnstile:
            answer = asyncio.create_task(server.engine.generate(request, on_sent=sent.set))
            waiter = asyncio.create_task(sent.wait())
            try:
                await asyncio.wait({answer, waiter}, return_when=asyncio.FIRST_COMPLETED)
                # The server reads its connections in the order in which data arrives: leave it time for this one.
                await asyncio.sleep(0.002)
            except BaseException:
                answer.cancel()
                raise
            finally:
                waiter.cancel()
            self._sent += 1
        return self._check_versions(server, await answer, oldest)

    def _keep(self, prefix: Generated | None, partial: Generated | None, held: str) -> Generated | None:
        """The prefix with what came in behind it, as far as its weights are those that they must be."""
        oldest = self._versions.get(held, 0)
        if partial is None or not self._flush_tokens:
            return prefix
        if any(self._versions.get(span.version, -1) < oldest for span in partial.versions):
            return prefix
        self._kept_tokens += len(partial.response_ids)
        return join(prefix, partial)

    def _too_old(self, prefix: Generated) -> bool:
        """Whether no update can use these tokens any more: the next one starts from the published weights or later."""
        oldest = min((self._versions.get(span.version, -1) for span in prefix.versions), default=0)
        return self._max_staleness is not None and len(self._versions) - 1 - oldest > self._max_staleness

    def _check_versions(self, server: Server, answer: Generated, oldest: int) -> Generated:
        """Refuses tokens of weights that were never published, or of older ones than the server held at the start."""
        for span in answer.versions:
            if self._versions.get(span.version, -1) < oldest:
                error = InvalidAnswerError(
                    f"{server.name} answered with tokens of the weights {span.version!r} while it should hold "
                    f"{server.health.version!r}",
                    "version",
                )
                self._suspect(server, error)
                raise error
        return answer

    async def _try(self, server: Server, call: Callable[[], Awaitable[None]]) -> bool:
        """Makes a call to a server; one that fails is suspect."""
        try:
            await call()
        except RoleError as error:
            self._suspect(server, error)
            return False
        return True

    async def _went_away(self, server: Server, error: BaseException) -> bool:
        """Whether a push failed because the server is gone, and not because it did not take the weights."""
        if isinstance(error, EngineAwayError) and error.lost:
            return True
        return isinstance(error, EngineAwayError | RoleTimeoutError) and not await server.engine.healthy()

    async def _wait_for_return(self, publication: Publication, cause: BaseException) -> float:
        began = time.monotonic()
        self._events.append("role", role="rollout", state="suspect", detail=f"waited for: {cause}")
        try:
            async with asyncio.timeout(self._away_s), self._changed:
                await self._changed.wait_for(
                    lambda: any(server.health.version == publication.version for server in self._usable())
                )
        except TimeoutError:
            raise RoleTimeoutError(
                f"no server took the weights of {publication.version} within {self._away_s:g} s; the push failed by: "
                f"{cause}",
                role="rollout",
            ) from cause
        return time.monotonic() - began

    async def _bring(self, server: Server) -> float:
        publication = self._published
        if publication is None:
            return 0.0
        server.health.pushing()
        await server.engine.connect()
        if not server.initialised:
            await server.engine.init_transfer(server.engine.address.init_info)
            server.initialised = True
        pause = await server.engine.push(publication.update_info, publication.version, mode=self._mode)
        await self._prove(server, publication)
        server.health.proved(publication.version)
        await self._notify()
        return pause

    async def _prove(self, server: Server, publication: Publication) -> None:
        scores = [await server.engine.score(item["prompt_ids"], item["response_ids"]) for item in self._probe_inputs]
        held = np.concatenate(scores) if scores else np.zeros(0, np.float32)
        previous = self._previous_probe if server.health.version else None
        if failure := probe_failure(held, _values(publication), previous, self._limits):
            raise RoleError(
                f"{server.name} does not compute with the weights of {publication.version}: {failure}",
                role="rollout",
                fix="The push reported success but the weights did not arrive; see the server's log",
            )

    def _suspect(self, server: Server, error: NightshiftError) -> None:
        server.error = error.message
        if server.health.suspect():
            self._events.append("role", role="rollout", state="suspect", detail=f"{server.name}: {error.message}")

    def _usable(self) -> list[Server]:
        return [server for server in self.servers if server.health.usable]

    async def _acquire(self, deadline: float) -> Server:
        async with self._changed:
            while True:
                if usable := self._usable():
                    return min(usable, key=lambda server: server.running)
                left = deadline - time.monotonic()
                if left <= 0:
                    causes = "; ".join(f"{server.name}: {server.error or 'no weights yet'}" for server in self.servers)
                    raise RoleTimeoutError(
                        f"no rollout server was usable for {self._away_s:g} s ({causes})", role="rollout"
                    )
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    continue

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._read_addresses()
            except (KeyError, TypeError, ValueError) as error:
                self._events.append("warning", role="agent", message=f"addresses of the services: {error!r}")
            for server in self.servers:
                if server.health.due(time.monotonic()):
                    await self._repair(server)

    async def _read_addresses(self) -> None:
        for address in self._refresh() or []:
            known = self._servers.get(address.name)
            if known is None or known.engine.address.incarnation != address.incarnation:
                self._servers[address.name] = Server(address, self._request_timeout_s, self._flush_tokens)
                if known is not None:
                    await known.engine.close()

    async def _repair(self, server: Server) -> None:
        """Brings a server that is not healthy to the published weights, if it answers."""
        if self._push_lock.locked() or self._published is None or not await server.engine.healthy():
            return
        began = time.monotonic()
        try:
            async with self._push_lock:
                if server.health.usable:
                    return
                await self._bring(server)
        except NightshiftError as error:
            server.error = error.message
            server.health.failed(time.monotonic())
            self._events.append("warning", role=error.role or "rollout", message=error.message)
            return
        self._events.append(
            "role",
            role="rollout",
            state="ready",
            detail=f"{server.name} holds {server.health.version} again",
            seconds=time.monotonic() - began,
        )


def _values(publication: Publication | None) -> np.ndarray:
    if publication is None or not publication.probe:
        return np.zeros(0, np.float32)
    return np.concatenate([np.asarray(item["logprobs"], dtype=np.float32) for item in publication.probe])
