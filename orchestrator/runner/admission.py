"""When a prompt group may start, and when an update must wait: the staleness bound as a pure state machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Admission:
    """Counts groups against the bound ``accepted + running < sum of finished batches + (eta + 1) * batch``.

    Steps count from 0: step s trains on weights of version s and makes version s + 1. A group that starts while f steps
    are finished (and their weights are on the servers) holds tokens of version f or later.

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

    @property
    def limit(self) -> int:
        """Most groups that may be accepted or running now."""
        left = max(0, self.total_steps - self.finished_steps)
        ahead = left if self.max_staleness is None else min(left, self.max_staleness + 1)
        return self.finished_groups + ahead * self.batch

    def may_start(self, accepted: int, running: int) -> bool:
        """Whether one more group may start.

        Args:
            accepted: groups trained or ready; dropped, filtered and failed ones are left out.
            running: groups being generated or scored.
        """
        if self.max_in_flight is not None and running >= self.max_in_flight:
            return False
        return accepted + running < self.limit


def staleness(oldest_version: int, step: int) -> int:
    """Versions between a sample's oldest token and the weights that step ``step`` starts from."""
    return step - oldest_version


def too_old(oldest_version: int, step: int, max_staleness: int | None) -> bool:
    """Whether a sample with this oldest token may not be used by ``step``."""
    return max_staleness is not None and staleness(oldest_version, step) > max_staleness


def must_wait_for(
    started: Iterable[tuple[int, int]], step: int, max_staleness: int | None, taken: frozenset[int] = frozenset()
) -> list[int]:
    """Running groups that the update of ``step`` would make too old for every later step.

    Args:
        started: (group index, version at its start) of the groups in flight.
        step: the update that is about to be made; the next chance of a group is ``step + 1``.
        taken: groups that this update uses.

    Returns:
        Indices of the groups to wait for; empty where the update may be made now.
    """
    return sorted(index for index, at in started if index not in taken and too_old(at, step + 1, max_staleness))
