"""When a role that ended is started again, and when not any more. Pure: times are passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RestartPolicy:
    """Growing pauses between restarts; gives up on a role that keeps ending soon after its start."""

    limit: int = 3  # early deaths in a row after which it gives up
    early_s: float = 20.0  # a death sooner than this after the role was ready is early
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    early_deaths: int = 0

    def died(self, uptime_s: float) -> float | None:
        """Takes note of a death.

        Args:
            uptime_s: seconds for which the role had been ready; 0 where it never was.

        Returns:
            Seconds to wait before the next start; None: give up.
        """
        self.early_deaths = self.early_deaths + 1 if uptime_s < self.early_s else 1
        if uptime_s < self.early_s and self.early_deaths >= self.limit:
            return None
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** (self.early_deaths - 1))
