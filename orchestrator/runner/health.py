"""Whether a rollout server may be used: its health as a state machine, and the proof that weights arrived. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from nightshift.wire.experience import Floats

#: Seconds until a server that failed is tried again: the first pause, doubled by each failure, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0


class ServerState(StrEnum):
    """Health of one server."""

    STALE = "stale"  # weights unknown, or not the published ones
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # a request failed; checked before it gets work again
    ASLEEP = "asleep"  # it holds no weights until the next push, on purpose
    DEAD = "dead"  # it does not answer its health check
    RESTARTING = "restarting"  # it hangs: whoever started it was asked to start it again
    RETIRED = "retired"  # it left the run; there is no way back but as a new server


@dataclass(slots=True)
class Health:
    """State of one start of a server. A push that was proved is the only way to ``HEALTHY``.

    A proof counts for the push that it belongs to: what happens to the server in between (it hangs, it leaves, it is
    pushed once more) makes it void.

    Attributes:
        version: weights that it was last proved to hold; "" for none.
        failures: failed attempts in a row to bring it to the published weights.
        next_try: when the next attempt is due, in seconds of the caller's clock.
    """

    state: ServerState = ServerState.STALE
    version: str = ""
    failures: int = 0
    next_try: float = 0.0
    _pushing: bool = False
    #: Is told of each change of the state.
    changed: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)

    def _enter(self, state: ServerState) -> None:
        self.state = state
        self.changed()

    @property
    def usable(self) -> bool:
        """Whether it may be given work."""
        return self.state is ServerState.HEALTHY

    def suspect(self) -> bool:
        """A request failed. Returns whether that is news."""
        news = self.usable
        if news:
            self._enter(ServerState.SUSPECT)
        return news

    def unanswered(self, now: float) -> bool:
        """It did not answer its health check. Returns whether that is news."""
        if self.state not in (ServerState.SUSPECT, ServerState.STALE) or self._pushing:
            return False
        self._enter(ServerState.DEAD)
        self.next_try = now + _FIRST_PAUSE_S
        return True

    def answered(self) -> None:
        """It answers its health check: one that was dead may hold anything now."""
        if self.state is ServerState.DEAD:
            self._enter(ServerState.STALE)

    def restarting(self, now: float) -> bool:
        """It hangs, and another start of it is on its way. Returns whether that is news.

        Where nobody starts it again, it is tried after a pause whether it has come to itself.
        """
        if self.state is ServerState.RETIRED:
            return False
        news = self.state is not ServerState.RESTARTING
        self._pushing = False
        self._enter(ServerState.RESTARTING)
        self.next_try = now + _LONGEST_PAUSE_S
        return news

    def asleep(self) -> None:
        """It sleeps, or is about to: it gets no work and needs none of the watcher's."""
        if self.state is not ServerState.RETIRED:
            self._pushing = False
            self._enter(ServerState.ASLEEP)

    def retire(self) -> None:
        """It left the run."""
        self._pushing = False
        self._enter(ServerState.RETIRED)

    def pushing(self) -> None:
        """Weights are on their way: what it holds is unknown until they are proved."""
        if self.state is not ServerState.RETIRED:
            self._pushing = True
            self._enter(ServerState.STALE)

    def proved(self, version: str) -> bool:
        """It holds these weights. Returns whether it is used now: not where the push was made void meanwhile."""
        if not self._pushing:
            return False
        self.version, self.failures, self.next_try = version, 0, 0.0
        self._pushing = False
        self._enter(ServerState.HEALTHY)
        return True

    def failed(self, now: float) -> None:
        """An attempt to bring it to the published weights failed."""
        self._pushing = False
        if self.state is ServerState.RETIRED:
            return
        if self.state is not ServerState.RESTARTING:
            self.next_try = now
            self._enter(ServerState.STALE)
        self.next_try = max(self.next_try, now + min(_FIRST_PAUSE_S * 2**self.failures, _LONGEST_PAUSE_S))
        self.failures += 1

    def due(self, now: float) -> bool:
        """Whether it should be brought to the published weights now."""
        return self.state not in (ServerState.HEALTHY, ServerState.ASLEEP, ServerState.RETIRED) and now >= self.next_try


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Mean |difference| of log-probs between server and trainer, in nats per token.

    Attributes:
        largest: above it the server does not hold the published weights.
        resolution: below it two policies cannot be told apart by the probe.
    """

    largest: float
    resolution: float

    def above(self, noise: float) -> ProbeLimits:
        """Limits for a server that was off by ``noise`` when it was first proved: other kernels round otherwise."""
        return replace(self, resolution=max(self.resolution, min(2 * noise, self.largest / 2)))


#: Measured: a float32 server agrees with the trainer to 1e-5 on a CPU and to 0.003 on a GPU; a bfloat16 one is off by
#: 0.03 to 0.04 in the mean.
PROBE_LIMITS = {"float32": ProbeLimits(1e-2, 5e-5), "bfloat16": ProbeLimits(0.15, 0.08)}


def probe_error(held: Floats, expected: Floats) -> float:
    """Mean |difference| of log-probs, in nats per token; 0 where there is no probe."""
    return float(np.abs(held - expected).mean()) if len(held) else 0.0


def probe_failure(held: Floats, expected: Floats, previous: Floats | None, limits: ProbeLimits) -> str:
    """Why a server cannot hold the published weights; "" where nothing speaks against it.

    Args:
        held: [K] log-probs of the probe's tokens by the server.
        expected: [K] the same by the trainer, with the published weights.
        previous: [K] the same by the trainer with the weights that the server held before; None where those are
            unknown.
        limits: how near they must be.
    """
    if not len(held):
        return ""
    error = probe_error(held, expected)
    moved = float(np.abs(expected - previous).mean()) if previous is not None and len(previous) else 0.0
    # A push that did nothing leaves an error as large as the step between the two policies, and one that reached some
    # of the tensors (a tied head is the usual victim) a part of it.
    unmoved = moved > 2 * limits.resolution and error > 0.5 * moved
    partly = moved > 0 and error > 4 * limits.resolution and error > 0.2 * moved
    if not np.isfinite(error) or error > limits.largest or unmoved or partly:
        return (
            f"its log-probs are {error:.2g} nats per token from the trainer's, where the update itself changed them by "
            f"{moved:.2g}"
        )
    return ""
