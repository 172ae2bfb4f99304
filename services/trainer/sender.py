"""Sends published weights to servers over links, beside whatever else the trainer does. No torch, no Ray."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Protocol

from nightshift.wire.errors import VersionConflictError


class Beside(Protocol):
    """Calls to rank 0 that do not wait for those of the training."""

    async def beside(self, method: str, *args: Any) -> Any:
        """Calls a method of rank 0.

        Raises:
            NightshiftError: what it raised, or that the rank is gone.
        """
        ...


class WeightSender:
    """The links of a trainer.

    Attributes:
        version: of the weights that are sent; "" where none may be.
    """

    def __init__(self, ranks: Beside) -> None:
        self.version = ""
        self._ranks = ranks
        self._running: set[asyncio.Future[Any]] = set()

    async def open(self, server: str, world: int, by_store: bool) -> dict[str, Any]:
        """Opens a link with a server; what the server needs to join it."""
        info: dict[str, Any] = await self._ranks.beside("open_link", server, world, by_store)
        return info

    async def join(self, server: str, timeout_s: float) -> float:
        """Waits until a server has joined its link; seconds that it took."""
        return await self._do("join_link", server, timeout_s)

    async def send(self, server: str, version: str, timeout_s: float) -> float:
        """Sends the published weights to a server; seconds that it took.

        Raises:
            VersionConflictError: others were published meanwhile, or none.
        """
        if version != self.version or not version:
            raise VersionConflictError(
                f"{server} asks for the weights {version!r}, those to be sent are {self.version!r}", role="trainer"
            )
        return await self._do("send_weights", server, timeout_s)

    async def settle(self) -> None:
        """Lets no further transfer begin, and waits for those that run: the weights are about to change."""
        self.version = ""
        if self._running:
            await asyncio.wait(self._running)  # each of them ends by its own deadline

    async def _do(self, method: str, server: str, timeout_s: float) -> float:
        began = time.monotonic()
        call = self._begin(method, server, timeout_s)
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:  # whoever asked has given the server up
            if not call.done():
                self._begin("drop_link", server)
            raise
        return time.monotonic() - began

    def _begin(self, method: str, *args: Any) -> asyncio.Future[Any]:
        call = asyncio.ensure_future(self._ranks.beside(method, *args))
        self._running.add(call)
        call.add_done_callback(self._ended)
        return call

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._running.discard(call)
        with suppress(asyncio.CancelledError):
            call.exception()
