"""Which traces a run stores: a share of them, and every one that failed or was slow. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

Span = dict[str, Any]

#: The span whose end decides about its trace.
ROOT = "group"
#: Traces whose decision is remembered for spans that come late, and durations that "slow" is measured by.
_REMEMBERED, _WINDOW = 10_000, 256
#: Groups before which nothing can be called slow.
_LEAST = 20


class TailSampler:
    """Decides about each prompt group's trace when it has ended, when it is known whether it failed or was slow.

    The job's own trace is always kept. A trace is chosen by its id, so that all processes would choose alike.

    Args:
        sink: gets the spans that are kept.
        share: of traces that are kept without a reason, 0..1; with 1 every span goes on at once.
        slow_share: the slowest share of the last groups is kept, by the time from issue to step.
        most_spans: held undecided; beyond it the oldest trace is decided on without its end.
    """

    def __init__(
        self, sink: Callable[[Span], None], share: float, *, slow_share: float = 0.05, most_spans: int = 50_000
    ) -> None:
        self.dropped = 0  # spans
        self._sink = sink
        self._share = share
        self._slow_share = slow_share
        self._most = most_spans
        self._held: OrderedDict[str, list[Span]] = OrderedDict()
        self._spans = 0
        self._kept: OrderedDict[str, bool] = OrderedDict()
        self._always: set[str] = set()
        self._durations: deque[float] = deque(maxlen=_WINDOW)

    def keep(self, trace_id: str) -> None:
        """Keeps every span of this trace from here on."""
        self._always.add(trace_id)
        for span in self._release(trace_id):
            self._sink(span)

    def offer(self, span: Span) -> None:
        """Takes one span that has ended."""
        trace_id = str(span["trace_id"])
        if self._share >= 1 or trace_id in self._always:
            self._sink(span)
        elif (kept := self._kept.get(trace_id)) is not None:
            self._give(span, kept)
        else:
            self._held.setdefault(trace_id, []).append(span)
            self._spans += 1
            if span["name"] == ROOT:
                self._decide(trace_id, float(span["end"]) - float(span["start"]))
            while self._spans > self._most:
                self._decide(next(iter(self._held)), None)

    def flush(self) -> None:
        """Gives out what is undecided: groups that a run's end found on their way."""
        for trace_id in list(self._held):
            for span in self._release(trace_id):
                self._sink(span)

    def _decide(self, trace_id: str, seconds: float | None) -> None:
        spans = self._release(trace_id)
        kept = self._chosen(trace_id) or _failed(spans) or (seconds is not None and self._slow(seconds))
        if seconds is not None:
            self._durations.append(seconds)
        self._kept[trace_id] = kept
        if len(self._kept) > _REMEMBERED:
            self._kept.popitem(last=False)
        for span in spans:
            self._give(span, kept)

    def _give(self, span: Span, kept: bool) -> None:
        if kept:
            self._sink(span)
        else:
            self.dropped += 1

    def _release(self, trace_id: str) -> list[Span]:
        spans = self._held.pop(trace_id, [])
        self._spans -= len(spans)
        return spans

    def _chosen(self, trace_id: str) -> bool:
        return int(trace_id[-8:], 16) < self._share * 2**32

    def _slow(self, seconds: float) -> bool:
        if len(self._durations) < _LEAST:
            return False
        ordered = sorted(self._durations)
        return seconds > ordered[min(len(ordered) - 1, int(len(ordered) * (1 - self._slow_share)))]


def _failed(spans: list[Span]) -> bool:
    return any(span.get("status") == "error" or span["name"] == "retry" for span in spans)
