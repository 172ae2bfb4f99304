"""One start of one rollout server, what the run knows of it, and how it is brought to published weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from nightshift.wire.errors import NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.experience import Floats
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.answers import EngineAwayError
from orchestrator.runner.capabilities import check_backend, check_sleep
from orchestrator.runner.engine import Engine, EngineAddress
from orchestrator.runner.health import Health, ProbeLimits, ServerState, probe_error, probe_failure
from orchestrator.runner.published import probe_values
from orchestrator.runner.stall import StallRule
from orchestrator.runner.trainer import Publication
from orchestrator.runner.weight_link import WeightLink


@dataclass(frozen=True, slots=True)
class Proof:
    """How a server proves that it holds the published weights.

    Attributes:
        inputs: sequences whose log-probs are compared.
        limits: how near server and trainer must be on them.
        mode: what becomes of running requests at a push: "keep" or "wait".
        keep_cache: whether running requests keep their cache, where the server can do that.
        sleeps: whether servers sleep while the trainer works.
    """

    inputs: Sequence[SequenceInput]
    limits: ProbeLimits
    mode: str = "keep"
    keep_cache: bool = False
    sleeps: bool = False


class _Work(AbstractContextManager[None]):
    """The time of one request on a server."""

    __slots__ = ("_server",)

    def __init__(self, server: Server) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._server.running += 1
        self._server.idle.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.running -= 1
        if not self._server.running:
            self._server.idle.set()


class Server:
    """One start of one server.

    Attributes:
        running: requests that are being drawn there; ``idle`` is set while there are none.
        error: why it was last left out; "" for no reason.
        pushing: held while weights are brought to it.
        stall: whether its requests get on.
    """

    def __init__(
        self, address: EngineAddress, request_timeout_s: float, flush_tokens: int = 0, stall_timeout_s: float = 120.0
    ) -> None:
        self.engine = Engine(address, request_timeout_s, flush_tokens)
        self.health = Health()
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.error = ""
        self.pushing = asyncio.Lock()
        self.stall = StallRule(stall_timeout_s)
        self._initialised = False
        self._link: WeightLink | None = None  # over which it was initialised
        self._noise: float | None = None  # how far from the trainer it was when it was first proved
        self._held_values: Floats | None = None  # of the probe, by the trainer, for the weights that it held last

    @property
    def address(self) -> EngineAddress:
        """Where it is."""
        return self.engine.address

    @property
    def name(self) -> str:
        """Name in logs and metrics."""
        return self.engine.address.name

    def work(self) -> AbstractContextManager[None]:
        """Within, one request is drawn there."""
        return _Work(self)

    async def bring(self, publication: Publication, proof: Proof) -> float:
        """Brings it to published weights and has it prove them; returns the seconds for which it stood still.

        Raises:
            NightshiftError: it is away, failed in a phase, or does not compute with the weights. It is not usable.
        """
        # A server in doubt is asked first: the phases of a push have deadlines that are far longer.
        if self.health.state is not ServerState.HEALTHY and not await self.engine.healthy():
            raise EngineAwayError(f"{self.name} at {self.address.url} does not answer its health check", lost=True)
        self.health.pushing()
        try:
            able = await self.engine.connect()
            if proof.sleeps:
                check_sleep(self.name, able)
            link = publication.link
            if not self._initialised or self._link is not link:  # another trainer has links of its own
                check_backend(self.name, able, publication.backend)
                if link is None:
                    await self.engine.init_transfer(self.address.init_info)
                else:
                    await link.join(self.name, self.engine, able.vllm)
                self._initialised, self._link = True, link
            pause = await self.engine.push(
                publication.update_info,
                publication.version,
                mode=proof.mode,
                keep_cache=proof.keep_cache,
                sleeps=proof.sleeps,
                sending=None if link is None else link.sending(self.name, publication.version, publication.bytes),
            )
            await self._prove(publication, proof)
        except NightshiftError:
            # A server of somebody else may have been started again without a word: it is prepared once more next time.
            self._initialised, self.engine.capabilities = False, None
            raise
        return pause

    async def lull(self, patience_s: float) -> None:
        """Puts it to sleep once its requests have ended; it gets none meanwhile, nor until weights are brought to it.

        Args:
            patience_s: longest time for its requests.

        Raises:
            RoleTimeoutError: its requests did not end, or it does not sleep as it should.
            RoleError: it is away, or cannot sleep.
        """
        self.health.asleep()
        check_sleep(self.name, await self.engine.connect())
        try:
            async with asyncio.timeout(patience_s):
                await self.idle.wait()
        except TimeoutError:
            message = f"requests on {self.name}, which was to sleep, did not end within {patience_s:g} s"
            raise RoleTimeoutError(message, role="rollout") from None
        await self.engine.sleep()

    def proved(self, publication: Publication) -> bool:
        """Notes that the push was proved; whether the server is used now."""
        self._held_values = probe_values(publication)
        return self.health.proved(publication.version)

    async def _prove(self, publication: Publication, proof: Proof) -> None:
        scores = [await self.engine.score(item["prompt_ids"], item["response_ids"]) for item in proof.inputs]
        held = np.concatenate(scores) if scores else np.zeros(0, np.float32)
        limits = proof.limits.above(self._noise or 0.0)
        if failure := probe_failure(held, probe_values(publication), self._held_values, limits):
            raise RoleError(
                f"{self.name} does not compute with the weights of {publication.version}: {failure}",
                role="rollout",
                fix="The push reported success but the weights did not arrive; see the server's log",
            )
        if self._noise is None:
            self._noise = probe_error(held, probe_values(publication))
