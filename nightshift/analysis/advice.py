"""What to change so that steps become shorter, in plain sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nightshift.analysis import speedup
from nightshift.analysis.sequence import bound_needed, sequence_seconds
from nightshift.analysis.speedup import StageTimes
from nightshift.analysis.staleness import Staleness

#: Below these shares a difference is not worth a sentence.
_GAP, _GAIN, _LOW_OCCUPANCY, _PUBLICATION = 0.10, 0.05, 0.6, 0.2


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run chose. ``max_staleness`` None: no bound; ``drain``: running requests end before each weight update."""

    max_staleness: int | None
    drain: bool


def advice(
    times: StageTimes,
    setting: Setting,
    measured: float | None,
    ages: Staleness | None,
    batches: Sequence[StageTimes] = (),
) -> list[str]:
    """Sentences, the one that gains most first.

    Args:
        times: of a usual step.
        measured: mean seconds of a step; None: not known.
        ages: staleness of what was trained on; None: not known.
        batches: the times of each batch, in order; empty: all as usual.
    """
    bound, batches = setting.max_staleness, batches or [times]
    step = sequence_seconds(batches, bound)
    if step <= 0:
        return []
    limit = speedup.limit(times, bound)
    lines = [_pace(times, setting, limit, step)]
    lines += _hidden(times, bound, limit, step)
    lines += _bound(batches, setting, limit, ages)
    if times.occupancy < _LOW_OCCUPANCY and limit in ("rollout", "staleness"):
        lines.append(
            f"Slots are {times.occupancy:.0%} full while a batch is generated: a few long answers hold it up. "
            "pipeline.weight_update in_flight with a larger pipeline.max_staleness refills them; a smaller "
            "rollout.max_response_length cuts the tail off."
        )
    if times.publication > _PUBLICATION * step:
        lines.append(
            f"Publication takes {times.publication:.2f} s of the trainer, {times.publication / step:.0%} of a step: "
            "larger batches publish less often."
        )
    if measured is not None and abs(measured - step) > _GAP * measured:
        lines.append(_gap(measured, step))
    return lines


def _pace(times: StageTimes, setting: Setting, limit: speedup.Limit, step: float) -> str:
    if setting.max_staleness == 0:
        return (
            f"Every stage waits for the one before it ({step:.2f} s): generation and scoring {times.experience:.2f} s, "
            f"training and publication behind them {times.behind + times.publication:.2f} s, delivery "
            f"{times.delivered:.2f} s."
        )
    match limit:
        case "trainer":
            return (
                f"The trainer sets the pace: training {times.training:.2f} s, publication {times.publication:.2f} s. "
                "More trainer.ranks, larger micro-batches or fewer samples per step shorten it; faster rollouts do not."
            )
        case "rollout":
            return (
                f"Generation sets the pace: {times.occupancy * times.generation:.2f} s of full slots and "
                f"{times.pause:.2f} s of pause. More rollout servers or devices, a larger rollout.max_num_seqs or "
                "shorter answers shorten it; a faster trainer does not."
            )
        case "scoring":
            return (
                f"Scoring sets the pace: {times.scoring:.2f} s. More rewards.workers, more replicas or larger "
                "scorers.batch_samples shorten it."
            )
        case "delivery":
            return (
                f"The delivery of weights sets the pace: {times.publication + times.delivered:.2f} s from the update "
                "to servers that hold it. Larger batches deliver less often."
            )
        case "staleness":
            return (
                f"The staleness bound sets the pace: {times.loop:.2f} s from a request to servers that have learned "
                f"from its answer (generation {times.generation:.2f} s, scoring behind it "
                f"{times.experience - times.generation:.2f} s, training and publication "
                f"behind it {times.behind + times.publication:.2f} s, delivery {times.delivered:.2f} s), and at most "
                f"{(setting.max_staleness or 0) + 1} batches on their way."
            )


def _hidden(times: StageTimes, bound: int | None, limit: speedup.Limit, step: float) -> list[str]:
    """How much more generation costs nothing."""
    factor = speedup.slack(times, bound)
    if bound == 0 or factor is None or limit in ("rollout", "staleness") or factor < 1 + _GAIN:
        return []
    return [
        f"Generation is hidden behind the {step:.2f} s of a step: it may take {factor:.1f} times as long before steps "
        "take longer. Fewer rollout cores or devices, or groups that are drawn and filtered out, cost nothing until "
        "then; a larger rollout.n costs training alone."
    ]


def _bound(batches: Sequence[StageTimes], setting: Setting, limit: speedup.Limit, ages: Staleness | None) -> list[str]:
    """Whether another staleness bound would pay."""
    bound, needed = setting.max_staleness, bound_needed(batches)
    if bound is not None and bound < needed:
        lines = []
        now = best = sequence_seconds(batches, bound)
        for other in sorted({min(bound + 1, needed), needed}):
            then = sequence_seconds(batches, other)
            if then < (1 - _GAIN) * best:
                best = then
                lines.append(
                    f"pipeline.max_staleness {other} in place of {bound} would make a step {then:.2f} s long by the "
                    f"model, {now / then:.2f} times as fast, with samples up to {other} versions old. Stages that "
                    "share cores gain less."
                )
        return lines
    if limit != "staleness" and (bound is None or bound > max(1, needed)):
        shown = "no bound" if bound is None else str(bound)
        seen = f"; samples were up to {ages.most} versions old" if ages is not None and ages.most is not None else ""
        return [
            f"pipeline.max_staleness {needed} keeps the slowest stage fed; {shown} makes samples older and no step "
            f"shorter{seen}."
        ]
    return []


def _gap(measured: float, step: float) -> str:
    if measured > step:
        return (
            f"A step takes {measured:.2f} s, {measured - step:.2f} s more than the model: batches slow one another "
            "down, or something outside the stages takes time."
        )
    return (
        f"A step takes {measured:.2f} s, {step - measured:.2f} s less than the model: stages overlap within a step, or "
        "the measured steps began with work that was ready."
    )
