"""What the staleness rule needs to be told: how many groups and steps are finished. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        made: batch sizes of the steps that were made and whose weights some server still lacks, oldest first.
    """

    max_staleness: int | None
    batch: int
    total_steps: int
    finished_groups: int = 0
    finished_steps: int = 0
    max_in_flight: int | None = None
    made: list[int] = field(default_factory=list)

    def make_step(self, groups: int) -> None:
        """Notes a step that trained ``groups`` groups."""
        self.made.append(groups)

    def finish_step(self) -> None:
        """Notes that all servers hold the weights of the oldest step of ``made``."""
        self.finished_groups += self.made.pop(0)
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
            made=self.made,
            max_in_flight=self.max_in_flight,
            steps_left=max(0, self.total_steps - self.finished_steps),
        )
