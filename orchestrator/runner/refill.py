"""How many requests the servers get at once: a window for each, moved by what its engine says of itself. Pure.

Increase and decrease as in Jain and Chiu, "Analysis of the increase and decrease algorithms for congestion avoidance in
computer networks" (1989), with the engine's own signs of congestion. A window begins without a limit, so that a server
that is never congested is never held back.

* Preempted requests lose their KV cache and are computed anew: the window falls to 0.7 of what was in flight.
* A queue longer than a quarter of what is being decoded holds requests that would be fresher if they were sent later:
  the window falls by what is too much. A short queue stays, since it refills slots the moment they come free.
* Where nothing waits, the KV cache has room and the window is what holds back, it grows by an eighth, or by one group.

While more is in flight than the window allows, nothing is changed: the last decrease has not shown its effect yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.runner.load import Load

_DECREASE = 0.7
_QUEUE_SHARE = 0.25
_GROWTH = 8
#: Share of the KV cache in use above which a window does not grow: running responses still become longer.
_KV_HIGH = 0.9


@dataclass(slots=True)
class Window:
    """Requests that one server may hold.

    Attributes:
        size: in requests; inf: no limit.
        load: the last reading.
        preemptions: since the server was first seen.
    """

    size: float = math.inf
    load: Load | None = None
    preemptions: float = 0.0

    def observe(self, load: Load, in_flight: int, group: int) -> None:
        """Moves the window.

        Args:
            load: a reading.
            in_flight: requests of this run on the server.
            group: requests of one prompt group: the window never falls below it, and grows by at least so many.
        """
        preempted = max(0.0, load.preemptions - self.load.preemptions) if self.load else 0.0
        self.preemptions += preempted
        self.load = load
        if in_flight > self.size:
            return
        too_much = load.waiting - max(float(group), _QUEUE_SHARE * load.running)
        if preempted:
            self._set(_DECREASE * in_flight, group)
        elif too_much > 0:
            self._set(in_flight - too_much, group)
        elif load.waiting == 0 and load.kv_usage < _KV_HIGH and in_flight + group > self.size:
            self._set(self.size + max(group, self.size // _GROWTH), group)

    def _set(self, size: float, group: int) -> None:
        self.size = max(float(group), float(math.floor(size)))


class Refill:
    """The windows of all servers.

    Args:
        group: requests of one prompt group.
        adaptive: false: there is no limit, whatever the servers say.
    """

    def __init__(self, group: int, *, adaptive: bool = True) -> None:
        self._group = group
        self._adaptive = adaptive
        self._windows: dict[str, Window] = {}
        self._narrow: set[str] = set()  # servers with a limit

    @property
    def limited(self) -> bool:
        """Whether any server has a limit."""
        return bool(self._narrow)

    def observe(self, server: str, load: Load, in_flight: int) -> None:
        """Takes a reading of one server."""
        window = self._windows.setdefault(server, Window())
        window.observe(load, in_flight, self._group)
        if self._adaptive and math.isfinite(window.size):
            self._narrow.add(server)

    def forget(self, server: str) -> None:
        """The server has left, or is another start: its window begins anew."""
        self._windows.pop(server, None)
        self._narrow.discard(server)

    def room(self, server: str, in_flight: int) -> bool:
        """Whether a server is below its window."""
        window = self._windows.get(server)
        return not self._adaptive or window is None or in_flight < window.size

    def limit(self, servers: Iterable[str]) -> int | None:
        """Prompt groups that these servers should draw from at once, at least 1; None: no limit."""
        windows = [self._windows.get(name) for name in servers]
        total = sum((window.size if window else math.inf) for window in windows)
        if not windows or not self._adaptive or math.isinf(total):
            return None
        return max(1, int(total) // self._group)

    def metrics(self, servers: Iterable[str]) -> dict[str, float]:
        """Means and sums over these servers, for the metrics of a step. Preemptions are those since the last call."""
        names = list(servers)
        windows = [window for name in names if (window := self._windows.get(name)) is not None]
        loads = [window.load for window in windows if window.load is not None]
        if not loads:
            return {}
        metrics = {
            "refill/kv_usage": sum(load.kv_usage for load in loads) / len(loads),
            "refill/running": sum(load.running for load in loads),
            "refill/waiting": sum(load.waiting for load in loads),
            "refill/preemptions": sum(window.preemptions for window in windows),
        }
        for window in windows:
            window.preemptions = 0.0
        limit = self.limit(names)
        if limit is not None:
            metrics["refill/limit_groups"] = float(limit)
        return metrics
