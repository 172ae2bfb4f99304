"""The staleness bound: when a group may start, when it may be used, and when an update has to wait.

Versions are integers within one lineage: version s is what the weights are after s updates. Update s (counted from 0)
starts from version s and makes version s + 1. A sample whose oldest token came from version t is ``s - t`` versions
stale when update s uses it, and the bound ``max_staleness`` (eta, None for unbounded) says ``s - t <= eta``. So the
last update that may use it is ``t + eta``: its deadline.

Two rules together keep the bound without throwing anything away:

* Admission counts groups: one more may start while ``accepted + running < finished + (eta + 1) * batch``, where
  ``finished`` sums the batches of the updates whose weights the servers hold, and ``accepted`` leaves out dropped and
  filtered groups. Then at most ``(v + eta + 1) * batch`` groups were started at version v or before, just as many as
  updates 0 .. v + eta use.
* Hold-back looks at what an update would leave behind. Admission alone would do if groups were used in the order in
  which they started; since a fast group may overtake a slow one, an update may go ahead only if all groups that it
  leaves behind, ready or running, can still be used in time, ``batch`` of them per update, earliest deadline first.
  The batch of the oldest groups always may, so waiting for those ends every wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, order=True)
class GroupAge:
    """A prompt group that waits to be used. Sorts by age, then by order of issue.

    Attributes:
        oldest_version: version of its oldest token; while it has none, the version on the servers when it started.
        order: place in the order of issue, unique.
    """

    oldest_version: int
    order: int


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What to do before update ``step``.

    Attributes:
        batch: the groups to use, oldest first; empty while the update has to wait.
        wait_for: running groups that hold the update back, oldest first. Empty together with ``batch``: too few groups
            are ready, and any of the running ones will do.
        drop: groups that no update can use within the bound any more, ready or running.
    """

    batch: tuple[GroupAge, ...] = ()
    wait_for: tuple[GroupAge, ...] = ()
    drop: tuple[GroupAge, ...] = ()

    @property
    def may_update(self) -> bool:
        """Whether the update may be made now."""
        return bool(self.batch)


def staleness(oldest_version: int, step: int) -> int:
    """Versions between a sample's oldest token and the weights from which update ``step`` starts."""
    return step - oldest_version


def is_usable(oldest_version: int, step: int, max_staleness: int | None) -> bool:
    """The hard check at use: whether update ``step`` may use a sample whose oldest token has this version.

    A version of the future is never usable: no such weights exist yet.
    """
    age = staleness(oldest_version, step)
    return age >= 0 and (max_staleness is None or age <= max_staleness)


def headroom(
    *,
    accepted: int,
    running: int,
    finished: int,
    batch_size: int,
    max_staleness: int | None,
    max_in_flight: int | None = None,
    steps_left: int | None = None,
) -> int:
    """Number of groups that may start now, 0 or more.

    Args:
        accepted: groups that were trained or are ready to be; dropped, filtered and failed ones are left out.
        running: groups that are being generated or scored.
        finished: sum of the batch sizes of the updates whose weights are on the servers. While a push is under way a
            new group still starts on the old version, and counting that update would admit one batch too many.
        batch_size: groups of the next update.
        max_staleness: eta; None for unbounded, which needs ``max_in_flight`` or ``steps_left``.
        max_in_flight: cap on ``running``; None for none.
        steps_left: updates that the run has yet to make, so that nothing is generated that no update will use.

    Raises:
        ValueError: nothing bounds the number of groups.
    """
    bounds: list[int] = []
    if max_staleness is not None:
        bounds.append(finished + (max_staleness + 1) * batch_size - accepted - running)
    if steps_left is not None:
        bounds.append(finished + steps_left * batch_size - accepted - running)
    if max_in_flight is not None:
        bounds.append(max_in_flight - running)
    if not bounds:
        raise ValueError("without a staleness bound, max_in_flight or steps_left has to bound the groups in flight")
    return max(0, min(bounds))


def plan_update(
    step: int,
    ready: Iterable[GroupAge],
    running: Iterable[GroupAge],
    *,
    batch_size: int,
    max_staleness: int | None,
    on_stale: Literal["wait", "drop"] = "wait",
) -> UpdatePlan:
    """Chooses the batch of update ``step``, or says what it has to wait for.

    With ``on_stale="wait"`` nothing is ever dropped as long as the batch size stays: see the module's docstring. After
    the batch size was lowered there may be more groups in flight than updates that could use them in time; those are
    dropped, since no wait would help. With ``on_stale="drop"`` the update is made as soon as enough groups are ready,
    and what it leaves too old is dropped.
    """
    ready, running = tuple(ready), tuple(running)
    late = [group for group in (*ready, *running) if not is_usable(group.oldest_version, step, max_staleness)]
    lost = set(late)
    waiting = sorted(group for group in running if group not in lost)
    usable = sorted(group for group in ready if group not in lost)
    drop = tuple(sorted(late))
    if len(usable) < batch_size:
        return UpdatePlan(drop=drop)
    batch, left = tuple(usable[:batch_size]), sorted(usable[batch_size:] + waiting)
    if max_staleness is None:
        return UpdatePlan(batch=batch, drop=drop)
    if on_stale == "drop":
        gone = [group for group in left if not is_usable(group.oldest_version, step + 1, max_staleness)]
        return UpdatePlan(batch=batch, drop=tuple(sorted(late + gone)))
    excess = _excess(left, step + 1, batch_size, max_staleness)
    if not excess:
        return UpdatePlan(batch=batch, drop=drop)
    still_running = set(waiting)
    oldest = sorted(usable + waiting)[:batch_size]
    wait_for = tuple(group for group in oldest if group in still_running)
    if wait_for:
        return UpdatePlan(wait_for=wait_for, drop=drop)
    return UpdatePlan(batch=batch, drop=tuple(sorted(late + excess)))


def _excess(groups: Sequence[GroupAge], first_step: int, batch_size: int, max_staleness: int) -> list[GroupAge]:
    """Groups for which no update is left: earliest deadline first, ``batch_size`` groups per update.

    Args:
        groups: sorted by age, which is also the order of their deadlines.
        first_step: the first update that could use one of them.
    """
    excess: list[GroupAge] = []
    placed = 0
    for group in groups:
        if first_step + placed // batch_size > group.oldest_version + max_staleness:
            excess.append(group)
        else:
            placed += 1
    return excess
