"""The report on a run's speed: what its steps took, what the model says they take, and where time is idle. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

from nightshift.analysis import speedup
from nightshift.analysis.advice import Setting, advice
from nightshift.analysis.batches import SCORERS, TRAINING, Batch, batches, busy, tail
from nightshift.analysis.recording import Recording, Step
from nightshift.analysis.sequence import bound_needed, sequence_curve, sequence_seconds
from nightshift.analysis.spans import Interval, occupancy, touches, without
from nightshift.analysis.speedup import StageTimes
from nightshift.analysis.staleness import Staleness, staleness

#: Spans of what interrupts the steps, and is left out of their times.
_INTERRUPTIONS = ("evaluate", "checkpoint")
#: The metric of each stage, in seconds.
_METRICS = {
    "generation": "timing/gen",
    "reward": "timing/reward",
    "reference": "timing/ref",
    "advantages": "timing/adv",
    "update": "timing/update_actor",
    "publication": "timing/publish",
    "pause": "timing/sync",
    "delivery": "timing/push",
    "wait": "timing/wait",
}


@dataclass(frozen=True, slots=True)
class Steps:
    """Which steps the figures are taken from, and what those took in seconds; None where nothing says it."""

    made: int
    used: list[int]
    left_out: dict[str, int]
    median: float | None
    mean: float | None


@dataclass(frozen=True, slots=True)
class Role:
    """A role's share of time, 0..1, with at least one request in hand, and without; None where it is not known."""

    role: str
    busy: float | None
    bubble: float | None
    predicted_bubble: float | None


@dataclass(frozen=True, slots=True)
class Predicted:
    """The model's step times in seconds, means over the measured batches with the times of each.

    Attributes:
        own: under the run's own staleness bound; None where the bound is not known.
        error: ``own / measured - 1``, against the mean step.
        limit: what sets the pace under the run's own bound.
        by_staleness: seconds by bound, "none" for no bound.
        other: under the other mode: synchronous for an asynchronous run, ``staleness_needed`` for a synchronous one.
    """

    sync: float
    own: float | None
    error: float | None
    limit: str | None
    other: float | None
    other_staleness: int | None
    by_staleness: dict[str, float]
    staleness_needed: int


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Occupancy ``u`` of the slots, 0..1, and the longest over the mean time of a sequence; medians over batches."""

    peak: int
    occupancy: float
    longest_over_mean: float


@dataclass(slots=True)
class Report:
    """All figures; what could not be had is None and named in ``missing``."""

    run_id: str
    mode: Literal["sync", "async"] | None
    max_staleness: int | None
    steps: Steps
    stages: dict[str, float | None]
    predicted: Predicted | None
    roles: list[Role]
    staleness: Staleness | None
    slots: SlotUse | None
    missing: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def report(recording: Recording) -> Report:
    """Draws the report up."""
    missing: list[str] = []
    setting = _setting(recording, missing)
    made = batches(recording.spans)
    steps, used, windows = _choose(recording, made, setting, missing)
    chosen = [made[step] for step in steps.used if step in made]
    stages = _stages(used, chosen, missing)
    slots = _slots(chosen, missing)
    times = _times(stages, slots, setting)
    if times is None and used:
        missing.append("predictions: they need the times of generation, scoring and training")
    sequence = _sequence(used, made, slots, setting, times) if times is not None else []
    predicted = _predict(sequence, times, steps.mean, setting) if times is not None else None
    ages = staleness(recording.rollouts) if recording.rollouts is not None else None
    if ages is None:
        missing.append("staleness: the run stored no rollouts (tracking.rollouts)")
    roles = _roles(recording, windows, stages, predicted, missing)
    return Report(
        recording.run_id,
        None if setting is None else "sync" if setting.max_staleness == 0 else "async",
        setting.max_staleness if setting is not None else None,
        steps,
        stages,
        predicted,
        roles,
        ages,
        slots,
        missing,
        advice(times, setting, steps.mean, ages, sequence) if times is not None and setting is not None else [],
    )


def _setting(recording: Recording, missing: list[str]) -> Setting | None:
    try:
        bound = recording.setting("pipeline", "max_staleness")
        return Setting(None if bound is None else int(bound), recording.setting("pipeline", "weight_update") == "drain")
    except (KeyError, TypeError, ValueError):
        missing.append("the run's own mode: job.yaml does not say pipeline.max_staleness and pipeline.weight_update")
        return None


def _choose(
    recording: Recording, made: dict[int, Batch], setting: Setting | None, missing: list[str]
) -> tuple[Steps, list[Step], list[Interval]]:
    """The steps to measure, and the time they cover.

    Left out are the first steps after each start, until the pipeline is full; the last of an asynchronous job, beside
    which nothing is generated any more; and those that an evaluation or a checkpoint interrupted. Where that leaves
    none, the interrupted ones count, else the last, else the first.
    """
    bound = setting.max_staleness if setting is not None else None
    first = 2 if bound is None else bound + 1  # the batches of these steps all start at once
    holes = [span.interval for name in _INTERRUPTIONS for span in recording.named(name)]
    evaluations = [span.interval for span in recording.named("evaluate")]
    reasons: dict[int, str] = {}
    since, starts = 0, sorted(recording.starts)
    for number, step in enumerate(recording.steps):
        window = step.window
        if window is None:
            reasons[step.step] = "without a time"
            continue
        earlier = recording.steps[number - 1].time if number else float("-inf")
        since = 0 if not number or any(earlier < start <= step.time for start in starts) else since + 1
        batch = made.get(step.step)
        generated = batch.window if batch is not None else None
        if since < min(first, max(1, len(recording.steps) // 2)):
            reasons[step.step] = "warm-up"
        elif step.step == recording.total_steps and bound != 0:
            reasons[step.step] = "run-out"
        elif touches(window, holes) or (generated is not None and touches(generated, evaluations)):
            reasons[step.step] = "interrupted"
    used = [step for step in recording.steps if step.step not in reasons]
    for second_choice in ("interrupted", "run-out", "warm-up"):
        if not used and second_choice in reasons.values():
            used = [step for step in recording.steps if reasons.get(step.step) == second_choice]
            reasons = {step: reason for step, reason in reasons.items() if reason != second_choice}
            missing.append(f"steps in full flow: there are none, so the figures are of {second_choice} steps")
    if not used:
        missing.append("step times: no finished step says how long it took")
    seconds = [step.window[1] - step.window[0] for step in used if step.window is not None]
    left_out = {reason: list(reasons.values()).count(reason) for reason in dict.fromkeys(reasons.values())}
    windows = [part for step in used if step.window is not None for part in without(step.window, holes)]
    return (
        Steps(
            len(recording.steps),
            [step.step for step in used],
            left_out,
            median(seconds) if seconds else None,
            fmean(seconds) if seconds else None,
        ),
        used,
        windows,
    )


def _stages(used: Sequence[Step], chosen: Sequence[Batch], missing: list[str]) -> dict[str, float | None]:
    """Medians over the steps, in seconds."""
    stages: dict[str, float | None] = {}
    for name, metric in _METRICS.items():
        stages[name] = _median([value for step in used if (value := step.metrics.get(metric)) is not None])
    scorers = [value for role in SCORERS if (value := stages[role]) is not None]
    stages["scoring"] = max(scorers, default=None)
    stages["scoring_tail"] = _median([value for batch in chosen if (value := batch.tail) is not None])
    stages["training_tail"] = _median([value for batch in chosen if (value := batch.training_tail) is not None])
    if used:
        for name in ("generation", "scoring", "update", "publication", "pause", "delivery"):
            if stages[name] is None:
                assumed = "; the model takes it as 0" if name in ("publication", "pause", "delivery") else ""
                metric = _METRICS.get(name, "timing/reward")
                missing.append(f"{name}: no {metric} in metrics.jsonl{assumed}")
        if stages["scoring_tail"] is None:
            missing.append("tail of scoring: no spans of generation and scoring; the model counts all of scoring")
    return stages


def _slots(chosen: Sequence[Batch], missing: list[str]) -> SlotUse | None:
    found = tail(chosen)
    share, longest = _median(found.occupancy), _median(found.longest)
    if share is None or longest is None:
        missing.append("slot occupancy: no spans of generation; the model takes it as 1")
        return None
    return SlotUse(found.peak, share, longest)


def _times(stages: dict[str, float | None], slots: SlotUse | None, setting: Setting | None) -> StageTimes | None:
    generation, scoring, update = stages["generation"], stages["scoring"], stages["update"]
    if generation is None or scoring is None or update is None:
        return None
    pause, rest = stages["pause"] or 0.0, stages["scoring_tail"]
    training, behind = update + (stages["advantages"] or 0.0), stages["training_tail"]
    drains = setting is not None and setting.drain
    return StageTimes(
        generation=generation,
        scoring=scoring,
        training=training,
        publication=stages["publication"] or 0.0,
        pause=pause,
        # Medians of a part and its whole come from different steps, and may cross.
        delivery=max(pause, stages["delivery"] or 0.0),
        scoring_tail=None if rest is None else min(rest, scoring),
        # A span holds the call as well as the work, unless a part of the work came before.
        training_tail=None if behind is None else min(behind, training),
        # Servers that are drained for each update cannot be refilled across it.
        occupancy=1.0 if slots is None or drains else slots.occupancy,
    )


def _sequence(
    used: Sequence[Step],
    made: dict[int, Batch],
    slots: SlotUse | None,
    setting: Setting | None,
    usual: StageTimes,
) -> list[StageTimes]:
    """The measured batches in their order; what one of them does not say is as usual."""
    found = []
    for step in used:
        batch = made.get(step.step, Batch())
        share = None if slots is None else occupancy(batch.generated, slots.peak)
        stages = {name: step.metrics.get(metric) for name, metric in _METRICS.items()}
        stages["scoring"] = max((value for role in SCORERS if (value := stages[role]) is not None), default=None)
        stages["scoring_tail"], stages["training_tail"] = batch.tail, batch.training_tail
        own = SlotUse(slots.peak, share, slots.longest_over_mean) if slots is not None and share else slots
        found.append(_times(stages, own, setting) or usual)
    return found or [usual]


def _predict(
    sequence: Sequence[StageTimes], times: StageTimes, measured: float | None, setting: Setting | None
) -> Predicted:
    curve = sequence_curve(sequence)
    sync, needed = curve[0], bound_needed(sequence)
    by_bound = {"none" if bound is None else str(bound): value for bound, value in curve.items()}
    if setting is None:
        return Predicted(sync, None, None, None, None, None, by_bound, needed)
    own = sequence_seconds(sequence, setting.max_staleness)
    other = 0 if setting.max_staleness != 0 else max(1, needed)
    return Predicted(
        sync,
        own,
        own / measured - 1 if measured else None,
        speedup.limit(times, setting.max_staleness),
        sequence_seconds(sequence, other),
        other,
        by_bound,
        needed,
    )


def _roles(
    recording: Recording,
    windows: Sequence[Interval],
    stages: dict[str, float | None],
    predicted: Predicted | None,
    missing: list[str],
) -> list[Role]:
    """Shares of the measured steps' time; a role counts as busy while a request to it is unanswered."""
    trainer = None if stages["update"] is None else stages["update"] + (stages["publication"] or 0.0)
    sources = {
        "rollout": (("generate",), stages["generation"]),
        **{role: ((role,), stages[role]) for role in SCORERS},
        "trainer": ((*TRAINING, "publish"), trainer),
    }
    step = predicted.own if predicted is not None else None
    roles = []
    for role, (names, seconds) in sources.items():
        intervals = [span.interval for name in names for span in recording.named(name)]
        if not intervals:
            if role in ("rollout", "trainer"):
                missing.append(f"busy share of the {role}: no spans {' and '.join(names)} in events.jsonl")
            continue
        share = busy(intervals, windows)
        bubble = max(0.0, 1 - seconds / step) if step and seconds is not None else None
        roles.append(Role(role, share, None if share is None else 1 - share, bubble))
    return roles


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
