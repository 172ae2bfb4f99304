"""The model of a step's time, from stages that were measured each for itself. Pure.

One optimiser step needs, in seconds:

==========  ============================================================================================
``G``       generation: from the first request of a batch to its last answer
``u``       occupancy: area under "sequences running" / (peak x ``G``), 0..1; what refilled slots save
``S``       scoring: time in which the slowest scorer worked on the batch
``R``       the part of scoring that comes after the last answer, ``R <= S``
``T``       training: advantages and update
``D``       the part of training that comes after the last score, ``D <= T``; all of it unless updates are streamed
``P``       publication: the trainer hands its weights out and cannot train meanwhile
``V``       delivery: from the published weights to servers that generate with them
``W``       pause: the part of ``V`` in which servers stand still, ``W <= V``
``K``       after a push under running requests: reading their contexts again, since a KV cache outlives no weights
``eta``     ``pipeline.max_staleness``
==========  ============================================================================================

A weight update and the batch that the staleness bound ties to it form a loop: a batch may start when the weights of
``eta + 1`` steps before its own are delivered, is generated, scored, trained on and published. One turn takes

    loop = max(max(G + R, S) + D, T) + P + V

and ``eta + 1`` batches are on their way around it. No stage can be faster than its own work either, so

    step(eta) = max(loop / (eta + 1),  u G + W + K,  S,  T + P,  P + V)

``eta = 0`` is the synchronous step, the loop itself, since no other term can exceed it (nothing runs while weights are
pushed, so that ``K`` is 0); without a bound the first term is 0. It follows that where ``K`` is 0 an asynchronous step
never takes longer than a synchronous one, that it is at most ``eta + 1`` times as fast, and that two balanced stages
gain at most 2 times, three at most 3 times, where ``u`` is 1 and ``D`` is ``T``.

What the model leaves out: stages that share cores or memory slow one another down, so times measured while others
worked make the synchronous step look longer than it would be. Steps are taken to be alike; where they are not,
:mod:`nightshift.analysis.sequence` follows each batch around the loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Limit = Literal["staleness", "rollout", "scoring", "trainer", "delivery"]

#: Staleness bounds that :func:`curve` covers; None is no bound.
BOUNDS: tuple[int | None, ...] = (0, 1, 2, 4, 8, None)


#: Less than a clock can tell from nothing.
_CLOCK_S = 1e-9


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds per step of each stage, measured with nothing else counted in.

    Attributes:
        generation: ``G``.
        scoring: ``S``.
        training: ``T``.
        publication: ``P``.
        pause: ``W``.
        delivery: ``V``; None: as long as the pause.
        scoring_tail: ``R``; None: all of ``S``, as where scoring begins with a whole batch.
        training_tail: ``D``; None: all of ``T``.
        occupancy: ``u``, in (0, 1].
        recompute: ``K``; :func:`recompute_seconds` gives it from the contexts that run.

    Raises:
        ValueError: a time is negative or not finite, a part is longer than its whole, or the occupancy is outside
            (0, 1].
    """

    generation: float
    scoring: float
    training: float
    publication: float = 0.0
    pause: float = 0.0
    delivery: float | None = None
    scoring_tail: float | None = None
    training_tail: float | None = None
    occupancy: float = 1.0
    recompute: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "generation",
            "scoring",
            "training",
            "publication",
            "pause",
            "delivery",
            "scoring_tail",
            "training_tail",
            "recompute",
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}, and a time is a number from 0 on")
        if not 0 < self.occupancy <= 1:
            raise ValueError(f"occupancy is {self.occupancy!r}, and a share lies in (0, 1]")
        if self.delivery is not None and self.delivery < self.pause:
            raise ValueError(f"the pause ({self.pause} s) is part of the delivery ({self.delivery} s)")
        if self.scoring_tail is not None and self.scoring_tail > self.scoring:
            raise ValueError(f"the tail ({self.scoring_tail} s) is part of scoring ({self.scoring} s)")
        if self.training_tail is not None and self.training_tail > self.training:
            raise ValueError(f"the tail ({self.training_tail} s) is part of training ({self.training} s)")

    @property
    def experience(self) -> float:
        """``max(G + R, S)``: from the first request of a batch to its last score."""
        tail = self.scoring if self.scoring_tail is None else self.scoring_tail
        return max(self.generation + tail, self.scoring)

    @property
    def delivered(self) -> float:
        """``V``."""
        return self.pause if self.delivery is None else self.delivery

    @property
    def behind(self) -> float:
        """``D``."""
        return self.training if self.training_tail is None else self.training_tail

    @property
    def loop(self) -> float:
        """``max(max(G + R, S) + D, T) + P + V``: from a request to servers that have learned from its answer."""
        return max(self.experience + self.behind, self.training) + self.publication + self.delivered

    @property
    def stages(self) -> dict[Limit, float]:
        """Seconds for which each stage is taken up by one step, whatever the staleness bound."""
        return {
            "rollout": self.occupancy * self.generation + self.pause + self.recompute,
            "scoring": self.scoring,
            "trainer": self.training + self.publication,
            "delivery": self.publication + self.delivered,
        }


def terms(times: StageTimes, max_staleness: int | None) -> dict[Limit, float]:
    """All terms of ``step(eta)``; the largest is the step's time. ``max_staleness`` None: no bound.

    Raises:
        ValueError: the bound is negative.
    """
    if max_staleness is None:
        return {"staleness": 0.0, **times.stages}
    if max_staleness < 0:
        raise ValueError(f"max_staleness is {max_staleness}, and it counts from 0")
    if max_staleness == 0:
        times = replace(times, recompute=0.0)
    return {"staleness": times.loop / (max_staleness + 1), **times.stages}


def step_seconds(times: StageTimes, max_staleness: int | None) -> float:
    """``step(eta)``; 0 is the synchronous step."""
    return max(terms(times, max_staleness).values())


def limit(times: StageTimes, max_staleness: int | None) -> Limit:
    """Which term sets the pace; a stage rather than the staleness bound where they are equal."""
    values = terms(times, max_staleness)
    order: tuple[Limit, ...] = ("trainer", "rollout", "scoring", "delivery", "staleness")
    return max(order, key=lambda name: values[name])


def sync_seconds(times: StageTimes) -> float:
    """``step(0)``: every stage after the other."""
    return step_seconds(times, 0)


def async_seconds(times: StageTimes) -> float:
    """``step(none)``: the slowest stage."""
    return step_seconds(times, None)


def speedup(times: StageTimes, max_staleness: int | None) -> float:
    """``step(0) / step(eta)``, from 1 to ``eta + 1``; 1 where no stage takes any time."""
    step = step_seconds(times, max_staleness)
    return sync_seconds(times) / step if step > 0 else 1.0


def curve(times: StageTimes) -> Mapping[int | None, float]:
    """``step(eta)`` for each of :data:`BOUNDS`."""
    return {bound: step_seconds(times, bound) for bound in BOUNDS}


def staleness_needed(times: StageTimes) -> int:
    """The least bound that leaves only the slowest stage: ``ceil(loop / step(none)) - 1``.

    By Little's law ``loop / step`` batches are on their way around the loop when no stage waits; a bound of eta admits
    ``eta + 1``. More gains nothing.
    """
    slowest = async_seconds(times)
    # Equal up to rounding is equal: 3 x 0.1 / 0.1 must not ask for a fourth batch.
    return max(0, math.ceil(times.loop / slowest - 1e-9) - 1) if slowest > 0 else 0


def bubbles(times: StageTimes, max_staleness: int | None) -> dict[Literal["rollout", "scoring", "trainer"], float]:
    """Share of a step, 0..1, in which a role has nothing to do.

    ``1 - G / step`` for rollout (0 where batches overlap: some sequence always runs), ``1 - S / step`` for scoring and
    ``1 - (T + P) / step`` for the trainer.
    """
    step = step_seconds(times, max_staleness)
    if step <= 0:
        return {"rollout": 0.0, "scoring": 0.0, "trainer": 0.0}
    return {
        "rollout": max(0.0, 1 - times.generation / step),
        "scoring": max(0.0, 1 - times.scoring / step),
        "trainer": max(0.0, 1 - (times.training + times.publication) / step),
    }


def slack(times: StageTimes, max_staleness: int | None) -> float | None:
    """By which factor generation could take longer before a step does; None where there is none to scale.

    Generation stands in two terms: ``k (u G) + W + K <= step`` and ``max(k G + R, S) + D + P + V <= (eta + 1) step``.
    """
    if times.generation < _CLOCK_S:
        return None
    step = step_seconds(times, max_staleness)
    standing = times.pause + (0.0 if max_staleness == 0 else times.recompute)
    factors = [(step - standing) / (times.occupancy * times.generation)]
    if max_staleness is not None:
        tail = times.scoring if times.scoring_tail is None else times.scoring_tail
        rest = times.behind + times.publication + times.delivered
        factors.append(((max_staleness + 1) * step - rest - tail) / times.generation)
    return max(1.0, min(factors))


def recompute_seconds(running: float, context_tokens: float, prefill_tokens_s: float) -> float:
    """``K`` of one server: ``running`` requests with ``context_tokens`` in the mean are read at this rate.

    Raises:
        ValueError: the rate is not positive.
    """
    if prefill_tokens_s <= 0:
        raise ValueError(f"prefill_tokens_s is {prefill_tokens_s!r}, and a rate is positive")
    return running * context_tokens / prefill_tokens_s


def drain_seconds(pause: float, drain: float, busy_share: float) -> float:
    """What a push costs the servers where they are drained first, in seconds of full generation.

    Args:
        pause: ``W``.
        drain: from the last request that is admitted before the push to the last answer, in seconds.
        busy_share: share of the slots that are decoding in the mean of the drain, 0..1.
    """
    return pause + drain * (1 - busy_share)
