"""The metrics of one step, from what its groups, its update and its publication say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nightshift.analysis.spans import Interval, covered, within
from orchestrator.runner.batch import advantage_metrics, batch_metrics, dropped_metrics
from orchestrator.runner.critic import value_metrics
from orchestrator.runner.group import Group
from orchestrator.runner.trainer import Publication, Updated
from orchestrator.runner.update import StepUpdate

#: The metric of each role that a group waits for, in seconds.
_TIMINGS = {
    "rollout": "timing/gen",
    "reward": "timing/reward",
    "reference": "timing/ref",
    "critic": "timing/values",
    "teacher": "timing/teacher",
}


def update_metrics(update: StepUpdate, updated: Updated, dropped: Sequence[Group], *, values: bool) -> dict[str, float]:
    """What was trained, and what the trainer says of it.

    Args:
        dropped: groups that were dropped as too old since the step before.
        values: whether the samples have a critic's values.
    """
    metrics = batch_metrics(update.groups, update.step - 1) | dropped_metrics(dropped)
    if update.report is not None:
        metrics |= advantage_metrics(update.report)
    if values:
        metrics |= value_metrics(update.samples)
    metrics["rollout/failed_groups"] = float(len(update.failures))
    metrics |= updated.metrics
    metrics.setdefault("lr", update.learning_rate)
    metrics["update/skipped"] = float(not updated.stepped)
    metrics["update/parts"] = float(len(update.parts))
    metrics["update/attempts"] = float(update.attempt + 1)
    return metrics


def stage_metrics(
    update: StepUpdate, updated: Updated, publication: Publication, roles: Iterable[str]
) -> dict[str, float]:
    """Seconds of each stage, and the size of the publication.

    Args:
        roles: those that groups of this run wait for: keys of the timings above.
    """
    times = {
        _TIMINGS[role]: covered(group.intervals[role] for group in update.groups if role in group.intervals)
        for role in roles
    }
    return {
        **times,
        "timing/wait": update.waited,
        "timing/adv": update.advantage_seconds,
        "timing/update_actor": updated.seconds,
        "timing/publish": publication.seconds,
        "sync/changed_fraction": publication.changed_fraction,
        "sync/bytes": float(publication.bytes),
        "memory/trainer_peak_bytes": float(updated.peak_memory_bytes),
    }


def rate_metrics(
    metrics: dict[str, float], window: Interval, training: Sequence[Interval], generating: Sequence[Interval]
) -> dict[str, float]:
    """How fast a step was and how idle its roles, over the time since the one before.

    Args:
        metrics: of the step: ``samples`` and ``response_length/mean`` are read.
        window: from the end of the step before to the end of this one, unix seconds.
        training: when the trainer worked.
        generating: when samples were drawn.
    """
    seconds = max(1e-9, window[1] - window[0])
    return {
        "timing/step": window[1] - window[0],
        "bubble/trainer": 1.0 - covered(within(training, [window])) / seconds,
        "bubble/rollout": 1.0 - covered(within(generating, [window])) / seconds,
        "samples_per_second": metrics["samples"] / seconds,
        "response_tokens_per_second": metrics["response_length/mean"] * metrics["samples"] / seconds,
    }
