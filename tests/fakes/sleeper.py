"""The part of the fake engine that sleeps and wakes, as vLLM does at level 2."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from tests.fakes.faults import Fault
from tests.fakes.requests import Refused, Request


class Sleeper:
    """Memory that is given away and taken back.

    Attributes:
        asleep: what of it is given away: "weights", "kv_cache".
        resumed_asleep: times that decoding was to go on without it, which would end a real server.
    """

    asleep: set[str]
    resumed_asleep = 0
    weights: Any
    _go: asyncio.Event
    _open: asyncio.Event

    def _turn(self, path: str, request: Request, fault: Fault | None) -> dict[str, Any] | None:
        """The answer of a route that has to do with it; None: another one answers."""
        honoured = not (fault and fault.kind == "noop")
        match path:
            case "/sleep":
                if honoured:
                    self._sleep()
            case "/wake_up":
                if honoured:
                    self.asleep.discard(request.path.rpartition("tags=")[2])
                if not self.asleep:
                    self._go.set()
                    self._open.set()
            case "/is_sleeping":
                return {"is_sleeping": bool(self.asleep) or not self._go.is_set()}
            case "/update_weights" if "weights" in self.asleep:
                raise Refused(500, "CUDA error: an illegal memory access was encountered")
            case "/resume":
                self.resumed_asleep += bool(self.asleep)
                return None
            case _:
                return None
        return {}

    def _sleep(self) -> None:
        """What runs is given up; weights and cache are gone."""
        self._go.clear()
        self._abort()
        self._stopped(True)
        self.asleep = {"weights", "kv_cache"}
        self.weights = np.full_like(self.weights, -1e9)
        self.weights[0] = 0.0

    def _abort(self) -> None:
        """Gives up what runs."""
        raise NotImplementedError

    def _stopped(self, clear_cache: bool) -> None:
        """Decoding stands still."""
        raise NotImplementedError
