"""Weights that the trainer sends to a server over a communicator of the two, while the server receives them (NCCL)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from nightshift.wire import codec
from nightshift.wire.errors import NightshiftError, RoleTimeoutError
from nightshift.wire.rollout import parse_version
from nightshift.wire.v1 import common_pb2, trainer_pb2

#: Since this version vLLM's workers take the id of the communicator with the call; before, they ask a store for it.
ID_SINCE = (0, 32)
#: Longest time until a server has joined: its workers load NCCL then.
_JOIN_S = 45.0
#: Longest time of a transfer: so much, and so many bytes a second beyond that.
_LEAST_SEND_S, _SLOWEST = 20.0, 1e9
#: What the other side gets beyond the deadline of the first.
_MARGIN_S = 5.0
#: Longest time for which a server may work on when the trainer has given it up, before it counts as hanging.
_GRACE_S = 3.0


class Joining(Protocol):
    """What is needed of :class:`orchestrator.runner.engine.Engine` to join a link."""

    async def init_transfer(self, info: dict[str, Any]) -> None: ...
    async def workers(self) -> int: ...


class WeightLink:
    """A trainer's ends of its links.

    Args:
        call: makes a call of the trainer's once: name, request, seconds.
    """

    def __init__(self, call: Callable[[str, Any, float], Awaitable[Any]]) -> None:
        self._call = call

    async def join(self, name: str, engine: Joining, vllm: str) -> None:
        """Makes a communicator with a server, in place of the one that there was.

        Args:
            vllm: version of the server.

        Raises:
            RoleTimeoutError: it does not join.
            RoleError: it refused, or the trainer could not.
        """
        request = trainer_pb2.OpenLinkRequest(
            server=name, world_size=1 + await engine.workers(), by_store=parse_version(vllm) < ID_SINCE
        )
        info = codec.unpack((await self._call("OpenLink", request, _JOIN_S)).init_info)
        join = trainer_pb2.JoinLinkRequest(server=name, timeout_s=_JOIN_S)
        await meet(name, engine.init_transfer(info), self._call("JoinLink", join, _JOIN_S + _MARGIN_S))

    def sending(self, name: str, version: str, size: int) -> Sending:
        """The transfer of so many bytes to a server, which has not begun."""
        return Sending(self._call, name, version, _LEAST_SEND_S + size / _SLOWEST)


@dataclass(frozen=True, slots=True)
class Sending:
    """The transfer of published weights to one server.

    Attributes:
        seconds: longest time that it may take.
    """

    call: Callable[[str, Any, float], Awaitable[Any]]
    server: str
    version: str
    seconds: float

    @property
    def patience_s(self) -> float:
        """Longest time for the server's own call: it is told by the end of the transfer what has become of it."""
        return self.seconds + 2 * _MARGIN_S

    async def beside(self, receiving: Coroutine[Any, Any, Any]) -> None:
        """Sends while the server receives; see :func:`meet`."""
        context = common_pb2.Context(policy_version=self.version)
        request = trainer_pb2.SendWeightsRequest(context=context, server=self.server, timeout_s=self.seconds)
        await meet(self.server, receiving, self.call("SendWeights", request, self.seconds + _MARGIN_S))


async def meet(name: str, asked: Awaitable[Any], sent: Awaitable[Any]) -> None:
    """Waits for a server and the trainer to do their parts of one thing. At the first error the other part ends too.

    Args:
        name: of the server.
        asked: what the server does; when it fails, the trainer is told by the end of its call.
        sent: what the trainer does.

    Raises:
        RoleTimeoutError: the trainer failed, and the server hangs in its part: it must be started again.
        NightshiftError: of the server, else of the trainer.
    """
    server, trainer = asyncio.ensure_future(asked), asyncio.ensure_future(sent)
    both = {server, trainer}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if not server.done():
            await asyncio.wait({server}, timeout=_GRACE_S)
        if not server.done():
            error = trainer.exception()
            cause = error.message if isinstance(error, NightshiftError) else str(error)
            raise RoleTimeoutError(f"{name} hangs in a transfer that the trainer has given up: {cause}", role="rollout")
        server.result()
        await trainer
    finally:
        for part in both:
            part.cancel()
        await asyncio.gather(*both, return_exceptions=True)
