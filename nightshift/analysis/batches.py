"""The batch of each step, from its groups' spans: when it was generated and scored. Pure; unix seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nightshift.analysis.recording import Span
from nightshift.analysis.spans import Interval, covered, occupancy, peak, union, within

#: Names of the spans around calls of a scorer, by role.
SCORERS = ("reward", "reference")
#: Names of the spans around the parts of an update; the last part is the step.
TRAINING = ("update_part", "optimizer_step")


@dataclass(slots=True)
class Batch:
    """What was generated and scored for one step.

    Attributes:
        generated: one interval per sample.
        scored: one interval per call of a scorer for a group.
        trained: one interval per part of its update.
    """

    generated: list[Interval] = field(default_factory=list)
    scored: list[Interval] = field(default_factory=list)
    trained: list[Interval] = field(default_factory=list)

    @property
    def window(self) -> Interval | None:
        """From the first request to the last answer; None without samples."""
        if not self.generated:
            return None
        return (min(start for start, _ in self.generated), max(end for _, end in self.generated))

    @property
    def tail(self) -> float | None:
        """Seconds from the last answer to the last score; None where either is not known."""
        if not self.generated or not self.scored:
            return None
        return max(0.0, max(end for _, end in self.scored) - max(end for _, end in self.generated))

    @property
    def training_tail(self) -> float | None:
        """Seconds of training after the last score; None where either is not known."""
        if not self.scored or not self.trained:
            return None
        last = max(end for _, end in self.scored)
        return covered([(max(start, last), end) for start, end in self.trained])


def batches(spans: Mapping[str, Sequence[Span]]) -> dict[int, Batch]:
    """Batches by step, from the spans ``group`` (which names the step), ``generate`` and those of the scorers.

    A group that was made again after a crash has one trace and several ``group`` spans: the last one counts, with what
    lies within it.
    """
    groups: dict[str, Span] = {}
    for span in spans.get("group", ()):
        if span.step is not None and (span.trace_id not in groups or span.end > groups[span.trace_id].end):
            groups[span.trace_id] = span
    found: dict[int, Batch] = {}
    for name in ("generate", *SCORERS):
        for span in spans.get(name, ()):
            group = groups.get(span.trace_id)
            if group is None or group.step is None or span.start < group.start or span.end > group.end:
                continue
            batch = found.setdefault(group.step, Batch())
            (batch.generated if name == "generate" else batch.scored).append(span.interval)
    for span in (span for name in TRAINING for span in spans.get(name, ())):
        if span.step in found:
            found[span.step].trained.append(span.interval)
    return found


@dataclass(frozen=True, slots=True)
class Tail:
    """How full the slots of generation were.

    Attributes:
        peak: most sequences that ran at once.
        occupancy: ``u`` of each batch against that peak, 0..1.
        longest: longest over mean time of a sequence, of each batch, from 1.
    """

    peak: int
    occupancy: list[float]
    longest: list[float]


def tail(found: Sequence[Batch]) -> Tail:
    """The tail of batches that were generated under the same conditions."""
    slots = peak([interval for batch in found for interval in batch.generated])
    shares = (occupancy(batch.generated, slots) for batch in found)
    longest = []
    for batch in found:
        seconds = [end - start for start, end in batch.generated]
        if sum(seconds) > 0:
            longest.append(max(seconds) * len(seconds) / sum(seconds))
    return Tail(slots, [share for share in shares if share is not None], longest)


def busy(intervals: Sequence[Interval], windows: Sequence[Interval]) -> float | None:
    """Share of the windows, 0..1, in which at least one interval runs; None where the windows hold no time."""
    time = covered(windows)
    return covered(within(union(intervals), windows)) / time if time > 0 else None
