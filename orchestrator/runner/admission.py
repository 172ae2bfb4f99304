"""What the staleness rule needs to be told: how many groups and steps are finished. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nightshift.algorithms.staleness import headroom


@dataclass(slots=True)
class Admission:
    """Says how many prompt groups may start, by :func:`nightshift.algorithms.staleness.headroom`.

    A step is finished here once its weights are on all servers: only then do new groups hold its version.

    Attributes:
        max_staleness: eta in policy versions, None for unbounded.
        batch: prompt groups of the next step; may change during the run.
        total_steps: steps of the run.
        finished_groups: sum of the batch sizes of the finished steps.
        finished_steps: steps whose weights all servers hold.
        max_in_flight: cap on running groups, None for none.
    """

    max_staleness: int | None
    batch: int
    total_steps: int
    finished_groups: int = 0
    finished_steps: int = 0
    max_in_flight: int | None = None

    def finish_step(self, groups: int) -> None:
        """Notes a step that trained ``groups`` groups and whose weights all servers hold."""
        self.finished_groups += groups
        self.finished_steps += 1

    def headroom(self, accepted: int, running: int) -> int:
        """Groups that may start now.

        Args:
            accepted: groups trained or ready; dropped, filtered and failed ones are left out.
            running: groups being generated or scored.
        """
        return headroom(
            accepted=accepted,
            running=running,
            finished=self.finished_groups,
            batch_size=self.batch,
            max_staleness=self.max_staleness,
            max_in_flight=self.max_in_flight,
            steps_left=max(0, self.total_steps - self.finished_steps),
        )
