"""The staleness bound: when a group may start, when it may be used, and when an update has to wait.

Versions are integers within one lineage: version s is what the weights are after s updates. Update s (counted from 0)
starts from version s and makes version s + 1. A sample whose oldest token came from version t is ``s - t`` versions
stale when update s uses it, and the bound ``max_staleness`` (eta, None for unbounded) says ``s - t <= eta``. So the
last update that may use it is ``t + eta``: its deadline.

Two rules together keep the bound without throwing anything away:

* Admission counts groups: one more may start while ``accepted + running < finished + (eta + 1) * batch``, where
  ``finished`` sums the batches of the updates whose weights the servers hold, and ``accepted`` leaves out dropped and
  filtered groups. Then at most ``(v + eta + 1) * batch`` groups were started at version v or before, just as many as
  updates 0 .. v + eta use. Where the batch size changes during a run, an update that was made and whose weights are
  still on their way counts with its own batch.
* Hold-back looks at what taking a group would leave behind. Admission alone would do if groups were used in the order
  in which they started; since a fast group may overtake a slow one, an update may take a group only if all others in
  flight, ready or running, can still be used in time: in the places that the update has left, then ``batch`` of them
  per update, earliest deadline first. The oldest group in flight always may be taken, so that waiting for it ends
  every wait.

Hold-back works on counts of groups by version, so that a plan costs what is ready and not what is in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
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


#: Sorts as :class:`GroupAge` does, in a tenth of the time: Python's own comparison makes two tuples each time.
_AGE = attrgetter("oldest_version", "order")


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Which ready groups an update may take now.

    Attributes:
        take: these, oldest first; no more than it has places for.
        held_by: running groups of this version or an older one hold the next ready group back: nothing but their end
            lets it in, and each end lets in one group more at most. None: no group is held back.
        drop: ready groups that no update can use within the bound any more.
        late: versions of which running groups can be used by no update any more.
    """

    take: tuple[GroupAge, ...] = ()
    held_by: int | None = None
    drop: tuple[GroupAge, ...] = ()
    late: frozenset[int] = frozenset()


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
    made: Sequence[int] = (),
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
        made: batch sizes of the updates that were made and whose weights are not on the servers yet, oldest first.
        max_staleness: eta; None for unbounded, which needs ``max_in_flight`` or ``steps_left``.
        max_in_flight: cap on ``running``; None for none.
        steps_left: updates that the run has yet to bring to the servers, those of ``made`` included, so that nothing is
            generated that no update will use.

    Raises:
        ValueError: nothing bounds the number of groups.
    """
    bounds: list[int] = []
    for updates in (None if max_staleness is None else max_staleness + 1, steps_left):
        if updates is not None:
            used = sum(made[:updates]) + max(0, updates - len(made)) * batch_size
            bounds.append(finished + used - accepted - running)
    if max_in_flight is not None:
        bounds.append(max_in_flight - running)
    if not bounds:
        raise ValueError("without a staleness bound, max_in_flight or steps_left has to bound the groups in flight")
    return max(0, min(bounds))


def plan_part(
    step: int,
    ready: Iterable[GroupAge],
    running: Mapping[int, int],
    *,
    places: int,
    batch_size: int,
    max_staleness: int | None,
    on_stale: Literal["wait", "drop"] = "wait",
) -> PartPlan:
    """Chooses the groups that update ``step`` may take, oldest first.

    With ``on_stale="wait"`` a group is only taken if that leaves no more groups without an update than there are
    anyway, which is none as long as the batch size is not lowered. With ``on_stale="drop"`` every ready group may be
    taken, and :func:`left_behind` names what the update leaves too old.

    Args:
        step: the update, from 0: it starts from the weights of this version.
        ready: groups that can be trained on, in any order.
        running: version -> number of groups that are generated or scored, by the version of :class:`GroupAge`.
        places: groups that the update still needs.
        batch_size: groups of the updates after it.
        max_staleness: eta; None for unbounded.
        on_stale: "wait" or "drop".
    """
    ready = sorted(ready, key=_AGE)
    versions = {group.oldest_version for group in ready}
    unusable = {version for version in versions if not is_usable(version, step, max_staleness)}
    usable = [group for group in ready if group.oldest_version not in unusable] if unusable else ready
    drop = tuple(group for group in ready if group.oldest_version in unusable) if unusable else ()
    late = frozenset(v for v, count in running.items() if count and not is_usable(v, step, max_staleness))
    if max_staleness is None or on_stale == "drop":
        return PartPlan(tuple(usable[:places]), None, drop, late)
    slack = _slack(step, usable, {v: n for v, n in running.items() if v not in late}, places, batch_size, max_staleness)
    lost = min(0, *slack.values()) if slack else 0
    take: list[GroupAge] = []
    for group in usable[:places]:
        # A place that goes to this group is one less for each older one that is still in flight.
        older = [version for version in slack if version < group.oldest_version]
        if min((slack[version] for version in older), default=1 + lost) - 1 < lost:
            return PartPlan(tuple(take), max(v for v in older if running.get(v)), drop, late)
        for version in older:
            slack[version] -= 1
        take.append(group)
    return PartPlan(tuple(take), None, drop, late)


def left_behind(
    step: int,
    left: Iterable[GroupAge],
    *,
    batch_size: int,
    max_staleness: int | None,
    on_stale: Literal["wait", "drop"] = "wait",
) -> list[GroupAge]:
    """Groups for which update ``step``, whose batch is complete, leaves no later update: they are to be dropped.

    With ``on_stale="wait"`` there are none unless the batch size was lowered.

    Args:
        step: the update that goes ahead.
        left: groups in flight, ready or running, that it does not take.
        batch_size: groups of the updates after it.
        max_staleness: eta; None for unbounded.
        on_stale: "wait" or "drop".
    """
    if max_staleness is None:
        return []
    if on_stale == "drop":
        return sorted(group for group in left if not is_usable(group.oldest_version, step + 1, max_staleness))
    return _excess(sorted(left, key=_AGE), step + 1, batch_size, max_staleness)


def _slack(
    step: int,
    ready: Sequence[GroupAge],
    running: Mapping[int, int],
    places: int,
    batch_size: int,
    max_staleness: int,
) -> dict[int, int]:
    """For each version in flight, by age: places up to its deadline, less the groups that are as old or older.

    All groups can be used in time exactly if none of these is negative (Hall's condition for nested sets of places);
    the least of them is minus the number of groups that cannot.
    """
    counts = Counter(group.oldest_version for group in ready)
    counts.update(running)
    slack: dict[int, int] = {}
    held = 0
    for version in sorted(version for version, count in counts.items() if count):
        held += counts[version]
        slack[version] = places + batch_size * (version + max_staleness - step) - held
    return slack


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
