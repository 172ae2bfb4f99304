"""Requests in a fixed order: while servers are held, they leave one after the other and are counted."""

from __future__ import annotations

import asyncio
import time

from nightshift.wire.errors import RoleTimeoutError
from orchestrator.runner.answers import Generated, GenerateRequest
from orchestrator.runner.engine import Engine

#: A server reads its connections in the order in which data arrives: seconds that are left to it for each request.
_ARRIVAL_S = 0.002
_LOOK_S = 0.005


class Turnstile:
    """Open, all requests pass at once; shut, one at a time."""

    def __init__(self) -> None:
        self._lock: asyncio.Lock | None = None
        self._sent = 0

    @property
    def shut(self) -> bool:
        """Whether requests pass one at a time."""
        return self._lock is not None

    def shut_down(self) -> None:
        """Shuts it; the count begins at 0."""
        self._lock, self._sent = asyncio.Lock(), 0

    def open_up(self) -> None:
        """Opens it."""
        self._lock = None

    async def generate(self, engine: Engine, request: GenerateRequest) -> Generated:
        """Sends a request when it is its turn, and waits for the answer outside."""
        if self._lock is None:
            return await engine.generate(request)
        sent = asyncio.Event()
        async with self._lock:
            answer = asyncio.create_task(engine.generate(request, on_sent=sent.set))
            waiter = asyncio.create_task(sent.wait())
            try:
                await asyncio.wait({answer, waiter}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(_ARRIVAL_S)
            except BaseException:
                answer.cancel()
                raise
            finally:
                waiter.cancel()
            self._sent += 1
        return await answer

    async def wait_sent(self, requests: int, away_s: float) -> None:
        """Waits until so many requests were sent since it was shut.

        Raises:
            RoleTimeoutError: they were not sent within ``away_s``.
        """
        deadline = time.monotonic() + away_s
        while self._sent < requests:
            if time.monotonic() > deadline:
                raise RoleTimeoutError(f"{self._sent} of {requests} requests were sent in {away_s:g} s", role="rollout")
            await asyncio.sleep(_LOOK_S)
