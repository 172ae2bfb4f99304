"""Rate limits by token bucket. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class RateLimit:
    """So many requests a second for each caller, and a burst at once.

    Args:
        per_second: tokens that come back each second.
        burst: most tokens that a caller holds.
        clock: seconds that never go back.
        callers: most callers kept; the one that was quiet longest is forgotten, which only favours it.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float], callers: int = 10_000) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._callers = callers
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._good: OrderedDict[str, None] = OrderedDict()

    def caller(self, credentials: str, address: str) -> str:
        """Whose rate a request counts to: that of its credentials where they were good before, else of its address. So
        whoever tries tokens, each once, does it at the rate of one caller, and holds up nobody who has one.
        """
        return credentials if credentials in self._good else address

    def note_good(self, credentials: str) -> None:
        """Credentials were good."""
        self._good[credentials] = None
        self._good.move_to_end(credentials)
        if len(self._good) > self._callers:
            self._good.popitem(last=False)

    def take(self, caller: str) -> float:
        """Takes a token: 0.0, or the seconds until there is one again."""
        now = self._clock()
        level, since = self._levels.pop(caller, (float(self._burst), now))
        level = min(self._burst, level + (now - since) * self._per_second)
        wait = 0.0 if level >= 1 else (1 - level) / self._per_second
        self._levels[caller] = (level - 1 if level >= 1 else level, now)
        if len(self._levels) > self._callers:
            self._levels.popitem(last=False)
        return wait
