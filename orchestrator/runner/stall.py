"""Whether a server that has requests gets on with them. Pure: times are passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StallRule:
    """A server hangs where it has requests and has drawn no token for ``timeout_s``, or told nothing for as long.

    A server may answer its health check and hang all the same: its engine is a process of its own.
    """

    timeout_s: float
    _since: float | None = None  # when it last was seen to get on, or to have nothing to do
    _tokens: float | None = None

    def reset(self, now: float) -> None:
        """It is not expected to get on just now: it is being pushed, or paused."""
        self._since = now

    def observe(self, now: float, *, requests: int, tokens: float | None) -> float:
        """Takes a reading.

        Args:
            now: seconds of the caller's clock.
            requests: that are being drawn there.
            tokens: drawn since its start; None: it did not say.

        Returns:
            Seconds for which it has not got on, where that is as long as ``timeout_s``; else 0.
        """
        moved = tokens is not None and tokens != self._tokens
        if tokens is not None:
            self._tokens = tokens
        if self._since is None or moved or requests == 0:
            self._since = now
        silent = now - self._since
        return silent if silent >= self.timeout_s else 0.0
