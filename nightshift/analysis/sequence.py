"""Steps that differ: each batch followed around the loop, with its own times. Pure.

The model of :mod:`nightshift.analysis.speedup` takes steps to be alike. Where answers differ in length they are not,
and stages wait although their means leave room: a long batch is waited for, and what a short one saves is lost to
the bound. With the symbols of that module, and those of batch ``k`` marked so, in the order of batches:

    start(k)     = delivered(k - eta - 1)
    generated(k) = max(start(k) + G(k),  served(k)),  served(k) = max(start(k), served(k - 1) + W(k - 1)) + u(k) G(k)
    scored(k)    = max(generated(k) + R(k),  max(start(k), scored(k - 1)) + S(k))
    trained(k)   = max(scored(k) + D(k),  max(free(k - 1), start(k)) + T(k))
    free(k)      = max(trained(k), delivered(k - 1)) + P(k)
    delivered(k) = free(k) + V(k)

Equal batches give the step times of that model.
"""

from __future__ import annotations

from collections.abc import Sequence

from nightshift.analysis.speedup import BOUNDS, StageTimes

#: Bounds that are looked through for the one above which nothing is gained, and what counts as nothing.
_LARGEST_BOUND, _NOTHING = 64, 0.01


def sequence_seconds(batches: Sequence[StageTimes], max_staleness: int | None) -> float:
    """Mean seconds of a step, where these batches come again and again in this order.

    Args:
        batches: at least one.
        max_staleness: None: no bound.

    Raises:
        ValueError: there are no batches, or the bound is negative.
    """
    if not batches:
        raise ValueError("a sequence holds at least one batch")
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness is {max_staleness}, and it counts from 0")
    on_their_way = 1 if max_staleness is None else max_staleness + 1
    # As many whole turns of a short sequence as batches are on their way, so that what those share out evens out; the
    # first turns fill the loop.
    turns = on_their_way * (1 + 4 // len(batches)) if len(batches) < 8 * on_their_way else 1
    ends = _ends(list(batches) * (3 * turns), max_staleness)
    count = len(batches) * turns
    return (ends[-1] - ends[-1 - count]) / count


def sequence_curve(batches: Sequence[StageTimes]) -> dict[int | None, float]:
    """:func:`sequence_seconds` for each of the bounds that a report shows."""
    return {bound: sequence_seconds(batches, bound) for bound in BOUNDS}


def bound_needed(batches: Sequence[StageTimes]) -> int:
    """The least bound whose steps are within a hundredth of those without one."""
    least = sequence_seconds(batches, None)
    for bound in range(_LARGEST_BOUND):
        if sequence_seconds(batches, bound) <= (1 + _NOTHING) * least:
            return bound
    return _LARGEST_BOUND


def _ends(batches: Sequence[StageTimes], max_staleness: int | None) -> list[float]:
    """When the trainer was free again after each batch, in seconds from the start."""
    served = scored = free = arrived = pause = 0.0
    delivered: list[float] = []
    ends = []
    for number, times in enumerate(batches):
        before = -1 if max_staleness is None else number - max_staleness - 1
        start = delivered[before] if before >= 0 else 0.0
        served, pause = max(start, served + pause) + times.occupancy * times.generation, times.pause
        tail = times.scoring if times.scoring_tail is None else times.scoring_tail
        generated = max(start + times.generation, served)
        scored = max(generated + tail, max(start, scored) + times.scoring)
        trained = max(scored + times.behind, max(free, start) + times.training)
        free = max(trained, arrived) + times.publication
        arrived = free + times.delivered
        delivered.append(arrived)
        ends.append(free)
    return ends
