"""Which waiting jobs start next. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits for its turn.

    Attributes:
        priority: higher goes first.
        order: position by submission; a resumed job keeps the one that it had.
    """

    job_id: str
    project: str
    priority: int
    order: int


def choose(
    waiting: Iterable[Waiting], running: Sequence[str], *, at_once: int, quotas: Mapping[str, int | None]
) -> list[str]:
    """The jobs to start now, in order.

    By priority first; among equals, a job of the project that has fewest jobs running; then by submission. A project
    at its quota is passed over, so that it never holds up others.

    Args:
        waiting: jobs that wait.
        running: the project of each job that has a process.
        at_once: most jobs with a process at one time.
        quotas: most running jobs of a project; None or absent: no limit of its own.
    """
    busy = Counter(running)
    left = list(waiting)
    chosen: list[str] = []
    while len(running) + len(chosen) < at_once:
        able = [job for job in left if (limit := quotas.get(job.project)) is None or busy[job.project] < limit]
        if not able:
            break
        job = min(able, key=lambda job: (-job.priority, busy[job.project], job.order, job.job_id))
        left.remove(job)
        busy[job.project] += 1
        chosen.append(job.job_id)
    return chosen
