"""The rollout servers of a run as one: requests that outlive a server, and weights that reach all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter

from nightshift.wire.errors import NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.events import EventLog
from orchestrator.runner.answers import (
    EngineAwayError,
    EngineRefusedError,
    Generated,
    GenerateRequest,
    InvalidAnswerError,
)
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.health import ServerState
from orchestrator.runner.prefix import completed, join, named, rest
from orchestrator.runner.published import Published
from orchestrator.runner.refill import Refill
from orchestrator.runner.roster import Lending, Roster
from orchestrator.runner.server import Proof, Server
from orchestrator.runner.trainer import Publication
from orchestrator.runner.turnstile import Turnstile
from orchestrator.runner.watcher import Watcher

#: States in which a publication does not wait for a server: the watcher brings it to the weights when it is back.
_AWAY = (ServerState.DEAD, ServerState.RESTARTING)
#: Time that is left to the other servers once the first one holds the weights: so many times what that one took.
_GRACE, _LEAST_GRACE_S = 3.0, 5.0
_RUNNING = attrgetter("running")
#: Seconds between two looks whether it is in vain to wait for a lease, or for servers that sleep on purpose.
_LEASE_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the requests of a run.

    Attributes:
        request_timeout_s: longest time for one response.
        away_s: longest time for which there may be no server.
        stall_timeout_s: without a token, although requests run, above which a server hangs.
        retries: attempts after the first that may be answered with something unusable.
        flush_tokens: tokens after which servers send a part of a response. What came in of one that broke off is kept,
            and only the rest is drawn again; 0: responses are drawn whole or not at all.
        max_staleness: versions between a kept token and the published weights, above which it is not kept; None: any.
        vocabulary: tokens of the policy; None: unknown.
    """

    request_timeout_s: float
    away_s: float
    stall_timeout_s: float = 120.0
    retries: int = 3
    flush_tokens: int = 0
    max_staleness: int | None = None
    vocabulary: int | None = None


class Fleet:
    """Routes requests to the least loaded healthy server, and keeps every server on the published weights.

    Args:
        refresh: reads the current addresses; a changed incarnation is a restarted server, one that is missing has left.
        proof: how a server proves that weights arrived.
        refill: how many requests the servers get at once.
        ask_restart: asks for another start of a server that hangs, with the reason.
        lending: who lends the servers: then it is nobody's fault that there is none; None: they are the run's own.
    """

    def __init__(
        self,
        addresses: list[EngineAddress],
        *,
        events: EventLog,
        refresh: Callable[[], list[EngineAddress] | None],
        proof: Proof,
        limits: Limits,
        refill: Refill | None = None,
        ask_restart: Callable[[EngineAddress, str], None] = lambda address, cause: None,
        lending: Lending | None = None,
    ) -> None:
        self._lending = lending
        self._events = events
        self._proof = proof
        self._limits = limits
        self._refill = refill or Refill(1)
        self._published = Published()
        self._turnstile = Turnstile()
        self._resting = False  # servers sleep until the next publication
        self._limit: int | None = None  # of the windows, at the last look

        def make(address: EngineAddress) -> Server:
            return Server(address, limits.request_timeout_s, limits.flush_tokens, limits.stall_timeout_s)

        self._roster = Roster(addresses, make, events, self._refill.forget, lending)
        self._watcher = Watcher(
            self._roster,
            self._published,
            proof,
            self._refill,
            events,
            refresh=refresh,
            ask_restart=ask_restart,
            changed=self._notify,
            held=lambda: self._turnstile.shut,
            resting=lambda: self._resting,
            patience_s=limits.request_timeout_s,
        )
        self._changed = asyncio.Condition()
        self._rejected: Counter[str] = Counter()
        self._kept_tokens = 0
        self._late: set[asyncio.Task[float]] = set()
        #: Is told when there may be room for further groups.
        self.on_room: Callable[[], Awaitable[None]] | None = None

    @property
    def running(self) -> int:
        """Requests on all servers."""
        return sum(server.running for server in self._roster)

    @property
    def servers(self) -> list[Server]:
        """All servers known now."""
        return list(self._roster)

    def room(self, groups: int) -> int | None:
        """Prompt groups that may start beside those that are being drawn, by what the servers say of themselves.

        None: there is no limit.
        """
        return None if self._limit is None else max(0, self._limit - groups)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the requests since the last call, and of the servers as they are."""
        rejected, self._rejected = self._rejected, Counter()
        kept, self._kept_tokens = self._kept_tokens, 0
        counted = (ServerState.HEALTHY, ServerState.ASLEEP)  # in a step they may sleep
        usable = [server.name for server in self._roster if server.health.state in counted]
        return {
            "rollout/kept_tokens": float(kept),
            **{f"rollout/rejected/{kind}": float(count) for kind, count in rejected.items()},
            "rollout/servers": float(len(self.servers)),
            "rollout/servers_usable": float(len(usable)),
            **self._refill.metrics(usable),
        }

    def start(self) -> None:
        """Begins to look after the servers."""
        if self._lending is not None:
            self._lending.begin()
        self._watcher.start()

    async def close(self) -> None:
        """Stops looking and closes all connections."""
        await self._watcher.close()
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._roster.close()
        if self._lending is not None:
            self._lending.end()

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
        deadline = time.monotonic() + self._limits.away_s
        attempt, pause = 0, 0.1
        prefix: Generated | None = None
        while True:
            asked = time.monotonic()
            server = await self._acquire(deadline)
            if self._lending is not None:  # to wait for others costs no patience
                deadline += time.monotonic() - asked
            if prefix is not None and self._too_old(prefix):
                prefix = None
            span = retry_span(attempt) if retry_span and attempt else nullcontext(request.traceparent)
            held = server.health.version
            try:
                with server.work(), span as traceparent:
                    part = named(rest(request, prefix), f"{request.request_id}.{attempt}", traceparent)
                    answer = await self._turnstile.generate(server.engine, part)
                    return join(prefix, self._check(server, answer, held))
            except EngineRefusedError:
                if prefix is None:
                    raise
                prefix = None  # a context that is full, for instance: the whole is asked for once more
            except InvalidAnswerError as error:
                self._rejected[error.kind] += 1
                if attempt >= self._limits.retries:
                    raise
                prefix = self._keep(prefix, error.partial, held)
            except (EngineAwayError, RoleTimeoutError) as error:
                self._watcher.suspect(server, error)
                prefix = self._keep(prefix, getattr(error, "partial", None), held)
                if self._lending is not None and not self._roster.has(server):  # asked back, and no fault of its own
                    deadline = time.monotonic() + self._limits.away_s
                if time.monotonic() + pause > deadline:
                    raise RoleTimeoutError(
                        f"{request.request_id} had no answer for {self._limits.away_s:g} s; last: {error.message}",
                        role="rollout",
                    ) from error
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
        self._published.add(publication)
        self._resting = False
        # One that is being brought to older weights just now is brought to these by the watcher, after that.
        servers = [s for s in self._roster if s.health.state not in _AWAY and not s.pushing.locked()]
        pushes = {asyncio.create_task(self._bring(server, publication)): server for server in servers}
        try:
            await self._wait_for_pushes(set(pushes))
        except BaseException:  # whoever asked for the push does not want it any more
            for task in pushes:
                task.cancel()
            await asyncio.gather(*pushes, return_exceptions=True)
            raise
        failed = {pushes[task]: error for task in pushes if task.done() and (error := task.exception())}
        if unexpected := next((error for error in failed.values() if not isinstance(error, NightshiftError)), None):
            raise unexpected
        pauses = [task.result() for task in pushes if task.done() and not task.exception()]
        late = [server for task, server in pushes.items() if not task.done()]
        if pauses:
            for server, cause in {**failed, **dict.fromkeys(late, "it takes longer than the others")}.items():
                if not self._roster.has(server):
                    continue  # it has left meanwhile
                message = f"{server.name} is left out until it holds the weights: {cause}"
                self._events.append("warning", role="rollout", message=message)
            return max(pauses)
        away = [error for server, error in failed.items() if await self._went_away(server, error)]
        if failed and not away:
            raise next(iter(failed.values()))
        if self._lending is not None and servers and not any(self._roster.has(server) for server in servers):
            return 0.0  # asked back meanwhile: whoever is lent next is brought to these weights first
        return await self._wait_for_return(publication, str(away[0]) if away else "all servers are away")

    async def release(self) -> None:
        """Before the trainer publishes: see :meth:`Published.release`."""
        await self._published.release(server.pushing for server in self._roster)

    async def sleep(self) -> float:
        """Has all servers give their GPU memory back until the next publication; returns the seconds that it took.

        Requests that run are waited for, and new ones wait for that publication. A server that fails to sleep is
        started again, and one that starts meanwhile is put to sleep as well.

        Raises:
            RoleError: a server cannot sleep.
        """
        began, self._resting = time.monotonic(), True
        await asyncio.gather(*(self._lull(server) for server in self._roster if server.health.state not in _AWAY))
        return time.monotonic() - began

    async def _lull(self, server: Server) -> None:
        async with server.pushing:
            try:
                await server.lull(self._limits.request_timeout_s)
            except (EngineAwayError, RoleTimeoutError) as error:
                self._watcher.hangs(server, error.message)

    @property
    def woke_s(self) -> float:
        """Seconds in which the servers were woken for the last publication, of the slowest."""
        return max((server.engine.woke_s for server in self._roster), default=0.0)

    async def _wait_for_pushes(self, pushes: set[asyncio.Task[float]]) -> None:
        """Waits for all of them; once one has succeeded, only for a while: the others go on beside what follows."""
        began, running = time.monotonic(), pushes
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if any(not task.exception() for task in done):
                break
        if running:
            grace = max(_LEAST_GRACE_S, _GRACE * (time.monotonic() - began))
            _, running = await asyncio.wait(running, timeout=grace)
        for task in running:
            self._late.add(task)
            task.add_done_callback(self._late_push_ended)

    def _late_push_ended(self, task: asyncio.Task[float]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.append("warning", role="rollout", message=f"a push that came late failed: {error}")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Holds all servers: requests sent meanwhile go out one after the other and are queued in that order.

        Raises:
            RoleTimeoutError: no server could be held within the time that a role may be away.
        """
        deadline = time.monotonic() + self._limits.away_s
        paused: list[Server] = []
        while not paused:
            await self._acquire(deadline)
            paused = [server for server in self._roster.usable if await self._try(server, server.engine.pause)]
        self._turnstile.shut_down()
        try:
            yield
        finally:
            self._turnstile.open_up()
            for server in paused:
                await self._try(server, server.engine.resume)

    async def wait_sent(self, requests: int) -> None:
        """Waits until so many requests were sent since the servers are held.

        Raises:
            RoleTimeoutError: they were not sent within the time that a role may be away.
        """
        await self._turnstile.wait_sent(requests, self._limits.away_s)

    def _keep(self, prefix: Generated | None, partial: Generated | None, held: str) -> Generated | None:
        """The prefix with what came in behind it, as far as its weights are those that they must be."""
        if partial is None or not self._limits.flush_tokens:
            return prefix
        oldest = max(0, self._published.place(held))
        if self._published.oldest(partial.versions, oldest) < oldest:
            return prefix
        if self._strange(partial) is not None:
            return prefix
        self._kept_tokens += len(partial.response_ids)
        return join(prefix, partial)

    def _too_old(self, prefix: Generated) -> bool:
        """Whether no update can use these tokens any more: the next one starts from the published weights or later."""
        bound = self._limits.max_staleness
        return bound is not None and self._published.behind(prefix.versions) > bound

    def _check(self, server: Server, answer: Generated, held: str) -> Generated:
        """Refuses ids that no policy token has, and tokens of weights that were never published, or of older ones than
        the server held at the start.
        """
        if (strange := self._strange(answer)) is not None:
            raise InvalidAnswerError(
                f"{server.name} answered with token {strange} of a policy with {self._limits.vocabulary}", "token_ids"
            )
        oldest = max(0, self._published.place(held))
        for span in answer.versions:
            if self._published.place(span.version) < oldest:
                error = InvalidAnswerError(
                    f"{server.name} answered with tokens of the weights {span.version!r} while it should hold "
                    f"{server.health.version!r}",
                    "version",
                )
                self._watcher.suspect(server, error)
                raise error
        return answer

    def _strange(self, answer: Generated) -> int | None:
        """A token that is beyond the policy's vocabulary."""
        largest = int(answer.response_ids.max()) if len(answer.response_ids) else 0
        return largest if self._limits.vocabulary is not None and largest >= self._limits.vocabulary else None

    async def _try(self, server: Server, call: Callable[[], Awaitable[None]]) -> bool:
        """Makes a call to a server; one that fails is suspect."""
        try:
            await call()
        except RoleError as error:
            self._watcher.suspect(server, error)
            return False
        return True

    async def _bring(self, server: Server, publication: Publication) -> float:
        resting = server.health.state is ServerState.ASLEEP
        back = not server.health.usable and not resting and self._published.place(publication.version) > 0
        async with server.pushing:
            try:
                pause = await server.bring(publication, self._proof)
            except NightshiftError as error:
                server.error = error.message
                server.health.failed(time.monotonic())
                if isinstance(error, RoleTimeoutError):
                    self._watcher.hangs(server, error.message)
                raise
            if self._published.current is not publication:  # a late one: the watcher brings it to the newer weights
                server.health.failed(time.monotonic())
            elif server.proved(publication) and back:
                self._watcher.back(server, publication.version, pause)
        await self._notify()
        return pause

    async def _went_away(self, server: Server, error: BaseException) -> bool:
        """Whether a push failed because the server is gone or hangs, and not because it did not take the weights."""
        if not self._roster.has(server):
            return True
        if isinstance(error, EngineAwayError) and error.lost:
            return True
        if isinstance(error, RoleTimeoutError) and server.address.managed:
            return True
        return isinstance(error, EngineAwayError | RoleTimeoutError) and not await server.engine.healthy()

    async def _wait_for_return(self, publication: Publication, cause: str) -> float:
        began = time.monotonic()
        if self._nothing_lent:
            return 0.0
        self._events.append("role", role="rollout", state="suspect", detail=f"waited for: {cause}")
        try:
            async with asyncio.timeout(self._limits.away_s), self._changed:
                await self._changed.wait_for(
                    lambda: (
                        self._nothing_lent
                        or any(server.health.version == publication.version for server in self._roster.usable)
                    )
                )
        except TimeoutError:
            raise RoleTimeoutError(
                f"no server took the weights of {publication.version} within {self._limits.away_s:g} s; the push "
                f"failed by: {cause}",
                role="rollout",
            ) from None
        return time.monotonic() - began

    @property
    def _nothing_lent(self) -> bool:
        """Whether others have all servers: whoever gets one later is brought to the published weights first."""
        return self._lending is not None and self._lending.empty

    async def _acquire(self, deadline: float) -> Server:
        if usable := self._roster.usable:
            return self._least_loaded(usable)
        async with self._changed:
            while True:
                if usable := self._roster.usable:
                    return self._least_loaded(usable)
                left, lent_out = deadline - time.monotonic(), self._nothing_lent
                if lent_out and self._lending is not None and (overdue := self._lending.overdue):
                    fix = "See `nightshift fleets` for who has the servers, and whether the service runs"
                    raise RoleTimeoutError(overdue, role="rollout", fix=fix)
                if idle := lent_out or self._resting:
                    left = _LEASE_LOOK_S
                if left <= 0:
                    causes = "; ".join(f"{s.name}: {s.error or 'no weights yet'}" for s in self._roster)
                    raise RoleTimeoutError(
                        f"no rollout server was usable for {self._limits.away_s:g} s ({causes or 'none is listed'})",
                        role="rollout",
                    )
                # Not asyncio.wait_for: cancelled twice, it leaves its inner task to take the lock, for good.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                if idle:  # what was lent now, or sleeps no more, has its time to become usable
                    deadline = max(deadline, time.monotonic() + self._limits.away_s)

    def _least_loaded(self, servers: list[Server]) -> Server:
        return min(servers, key=self._burden if self._refill.limited else _RUNNING)

    def _burden(self, server: Server) -> tuple[bool, int]:
        """Servers below their window come first, of those the least loaded."""
        return not self._refill.room(server.name, server.running), server.running

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        if self._limit is None and not self._refill.limited:
            return  # nothing holds groups back, nor did before: told of by each of hundreds of servers, at each reading
        # A push makes a server unusable for a moment: what it holds then still counts.
        serving = [s.name for s in self._roster if s.health.version and s.health.state not in _AWAY]
        if not serving:
            return
        before, self._limit = self._limit, self._refill.limit(serving)
        grew = before is not None and (self._limit is None or self._limit > before)
        if grew and self.on_room is not None:
            await self.on_room()
