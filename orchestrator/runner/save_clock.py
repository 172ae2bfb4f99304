"""When a checkpoint is due by the clock alone, so that a crash costs minutes and not the whole run. Pure."""

from __future__ import annotations

#: Most of the time that these checkpoints may take: where one is slow, the next one comes later.
_SHARE = 0.05


class SaveClock:
    """Says when a checkpoint is due, whatever the step is.

    Args:
        minutes: from one checkpoint of any kind to the next; None: never.
        now: seconds of any clock that never goes back; the run begins.
    """

    def __init__(self, minutes: float | None, now: float) -> None:
        self._interval_s = None if minutes is None else 60.0 * minutes
        self._due = None if self._interval_s is None else now + self._interval_s

    def due(self, now: float) -> bool:
        """Whether one is due."""
        return self._due is not None and now >= self._due

    def saved(self, began: float, now: float) -> None:
        """Takes note of a checkpoint that was written from ``began`` to ``now``."""
        if self._interval_s is not None:
            self._due = now + max(self._interval_s, (now - began) * (1.0 - _SHARE) / _SHARE)
