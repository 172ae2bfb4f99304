"""A model of one generation engine: slots, decode speed, KV cache, pauses and weight updates. Pure, clock passed in.

All running responses take part in each decode step, so that they grow by one token every ``base_s + sequence_s x b``
seconds, b of them running. ``progress`` counts decode steps; a response that was admitted at progress p with L tokens
to go ends at progress p + L, whatever happens to the speed meanwhile. Reading a context (a new prompt, a response that
was preempted, every running response after its cache was cleared) holds the engine for ``tokens / prefill_tokens_s``.
Where the cache is full, the response that was admitted last is preempted: its tokens are kept, its cache is read again
when it is admitted next.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an engine is.

    The defaults are one H200 with a model of 1.5 billion parameters: 425 tokens/s for one stream, 26,154 tokens/s for
    256 (docs/figures.md). ``prefill_tokens_s`` was not measured there; it is half of that card's matrix throughput.

    Attributes:
        base_s: seconds of a decode step before the first sequence.
        sequence_s: seconds that each sequence adds to a step.
        prefill_tokens_s: tokens of context read in a second.
        slots: sequences decoded at once.
        kv_tokens: tokens that the KV cache holds.
    """

    base_s: float = 0.00232
    sequence_s: float = 2.92e-5
    prefill_tokens_s: float = 125_000.0
    slots: int = 64
    kv_tokens: int = 400_000

    def step_s(self, running: int) -> float:
        """Seconds of a decode step."""
        return self.base_s + self.sequence_s * running


@dataclass(slots=True, eq=False)
class Stream:
    """One response.

    Attributes:
        context: tokens of its prompt.
        length: tokens that it will have.
        mark: tokens at which it is to be reported next; ``length`` where only its end is.
        spans: [version, first token] of each policy version that sampled it, in order.
    """

    name: str
    context: int
    length: int
    mark: int
    spans: list[tuple[str, int]] = field(default_factory=list)
    done: int = 0  # tokens before it was admitted last
    since: float = 0.0  # progress at that moment
    running: bool = False
    turn: int = 0  # counts admissions, so that marks of earlier ones are told apart


#: Called with a stream and its tokens so far when it has reached a mark, and when it has ended.
Report = Callable[[Stream, int], None]
_LEAST = 1e-9


class EngineModel:
    """State of one engine over time. Every call moves it to ``now`` first, in seconds of any clock."""

    def __init__(self, speed: Speed, report: Report, version: str = "", now: float = 0.0) -> None:
        self.speed = speed
        self.version = version
        self.paused = False
        self.waiting: deque[Stream] = deque()
        self.running: list[Stream] = []  # in order of admission
        self.preemptions = 0
        self.recomputed = 0  # tokens of context read a second time
        self.tokens = 0  # sampled, of ended and removed responses
        self.occupied_s = 0.0  # integral of the number of running responses over time
        self.frozen_s = 0.0  # time in which something ran and nothing was decoded
        self._report = report
        self._now = now
        self._stall = 0.0  # seconds of reading before decoding goes on
        self._progress = 0.0
        self._marks: list[tuple[float, int, int, Stream]] = []
        self._count = 0
        self._held = 0.0  # sum of (context + done - since) of what runs: cache use is this + running x progress

    @property
    def kv_used(self) -> float:
        """Tokens in the cache."""
        return self._held + len(self.running) * self._progress

    def tokens_of(self, stream: Stream) -> int:
        """Tokens of a response so far."""
        if not stream.running:
            return stream.done
        return min(stream.length, stream.done + math.floor(self._progress - stream.since + _LEAST))

    def add(self, stream: Stream, now: float) -> None:
        """Takes a request.

        Raises:
            ValueError: the cache cannot hold it even alone.
        """
        if stream.context + stream.length > self.speed.kv_tokens:
            raise ValueError(f"{stream.name}: {stream.context + stream.length} tokens, the cache holds fewer")
        self.advance(now)
        self.waiting.append(stream)
        self._admit()

    def remove(self, stream: Stream, now: float) -> None:
        """Gives a response up, wherever it is."""
        self.advance(now)
        if stream.running:
            self.tokens += self._leave(stream)
            self._admit()
        elif stream in self.waiting:
            self.waiting.remove(stream)

    def pause(self, now: float) -> None:
        """Stops decoding; what runs is kept."""
        self.advance(now)
        self.paused = True

    def clear_cache(self, now: float) -> None:
        """Forgets the cache: what runs is read again before it goes on."""
        self.advance(now)
        for stream in self.running:
            self._read(stream.context + self.tokens_of(stream), again=True)

    def update(self, version: str, now: float) -> None:
        """New weights: what is sampled from now on has this version."""
        self.advance(now)
        self.version = version
        for stream in self.running:
            self._label(stream)

    def resume(self, now: float) -> None:
        """Goes on decoding."""
        self.advance(now)
        self.paused = False
        self._admit()

    def next_event(self) -> float | None:
        """When :meth:`advance` should be called next; None while nothing can happen by itself."""
        if self.paused or not self.running:
            return None
        return (
            self._now
            + self._stall
            + max(0.0, self._next_mark() - self._progress) * self.speed.step_s(len(self.running))
        )

    def next_token_s(self, now: float) -> float:
        """Seconds until something that runs has its next token, once it may go on."""
        self.advance(now)
        return self._stall + self.speed.step_s(len(self.running))

    def advance(self, now: float) -> None:
        """Moves to ``now`` and reports what happened on the way. Times before the last one change nothing."""
        while self._now < now:
            busy = len(self.running)
            if self.paused or not busy:
                self._pass(now - self._now, frozen=True)
                return
            if self._stall > 0:
                spent = min(self._stall, now - self._now)
                self._stall = self._stall - spent if spent < self._stall else 0.0
                self._pass(spent, frozen=True)
                continue
            step = self.speed.step_s(busy)
            target = self._next_mark()
            due = max(0.0, target - self._progress) * step
            if due > now - self._now + _LEAST:
                self._progress += (now - self._now) / step
                self._pass(now - self._now)
                return
            self._progress = max(self._progress, target)
            self._pass(due)
            self._happen()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _pass(self, seconds: float, *, frozen: bool = False) -> None:
        self._now += seconds
        self.occupied_s += seconds * len(self.running)
        if frozen and self.running:
            self.frozen_s += seconds

    def _next_mark(self) -> float:
        """Progress at which a response reaches its mark, or the cache is full."""
        while self._marks and (self._marks[0][2] != self._marks[0][3].turn or not self._marks[0][3].running):
            heapq.heappop(self._marks)
        full = (self.speed.kv_tokens - self._held) / len(self.running)
        return min(self._marks[0][0], full) if len(self.running) > 1 else self._marks[0][0]

    def _happen(self) -> None:
        """Everything that is due at the present progress."""
        while self.running and self._marks:
            self._next_mark()
            if not self._marks or self._marks[0][0] > self._progress + _LEAST:
                break
            stream = heapq.heappop(self._marks)[3]
            tokens = self.tokens_of(stream)
            if tokens >= stream.length:
                self.tokens += self._leave(stream)
                stream.done = stream.length
                self._report(stream, stream.length)
            else:
                self._report(stream, tokens)
                self._push_mark(stream)
        while len(self.running) > 1 and self.kv_used >= self.speed.kv_tokens - _LEAST:
            self._preempt(self.running[-1])
        self._admit()

    def _admit(self) -> None:
        speed = self.speed
        while not self.paused and self.waiting and len(self.running) < speed.slots:
            stream = self.waiting[0]
            held = stream.context + stream.done
            # One decode step of everything that runs must fit as well, or the newcomer would leave at once.
            if self.running and self.kv_used + held + len(self.running) + 1 > speed.kv_tokens:
                return
            self.waiting.popleft()
            stream.running, stream.since, stream.turn = True, self._progress, stream.turn + 1
            self.running.append(stream)
            self._held += held - stream.since
            self._read(held, again=stream.done > 0)
            self._label(stream)
            self._push_mark(stream)

    def _leave(self, stream: Stream) -> int:
        """Takes a response out of the running ones; its tokens."""
        tokens = self.tokens_of(stream)
        self.running.remove(stream)
        self._held -= stream.context + stream.done - stream.since
        stream.running = False
        if not self.running:
            self._held = 0.0  # rounding must not add up over a long run
        return tokens

    def _preempt(self, stream: Stream) -> None:
        self.preemptions += 1
        stream.done = self._leave(stream)
        self.waiting.appendleft(stream)

    def _read(self, tokens: int, *, again: bool) -> None:
        self._stall += tokens / self.speed.prefill_tokens_s
        if again:
            self.recomputed += tokens

    def _label(self, stream: Stream) -> None:
        tokens = self.tokens_of(stream)
        if stream.spans and stream.spans[-1][0] == self.version:
            return
        if stream.spans and stream.spans[-1][1] == tokens:
            stream.spans.pop()  # nothing was sampled with the version before
        stream.spans.append((self.version, tokens))

    def _push_mark(self, stream: Stream) -> None:
        self._count += 1
        at = stream.since + min(stream.mark, stream.length) - stream.done
        heapq.heappush(self._marks, (at, self._count, stream.turn, stream))
