"""The simulated engine: the fake engine's routes over a model of speed and memory, for thousands of requests at once.

It speaks what the fake engine speaks (our route and vLLM's, pauses, weight updates, probes), with these differences:
lengths come from a distribution, ids and log-probs from a fixed pool, and time from :mod:`tests.sim.model`.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.wire.experience import VersionSpan
from nightshift.wire.frames import Frame, pack_frame
from tests.fakes import telling
from tests.fakes.engine import FakeEngine, Refused
from tests.fakes.faults import Fault
from tests.fakes.requests import VLLM, Request
from tests.fixtures.tokenizer_k import EOS, VOCAB_SIZE
from tests.sim.clock import Clock
from tests.sim.lengths import Lengths
from tests.sim.model import EngineModel, Speed, Stream

_POOL = 1 << 20
_rng = np.random.default_rng(11)
#: Ids other than the special ones, and log-probs as a model might give them.
_IDS = _rng.integers(4, VOCAB_SIZE, _POOL, dtype=np.int32)
_LOGPROBS = -_rng.exponential(0.5, _POOL).astype(np.float32)


class SimEngine(FakeEngine):
    """One simulated server.

    Args:
        clock: simulated time.
        speed: the model's parameters.
        lengths: distribution of response lengths; what a request allows at most cuts it off.
        load_s: seconds from a pause to the resume that follows it, beside the routes' own time: reading the weights.
        keep: whether requests are written down; thousands of them would need a lot of memory.
    """

    def __init__(
        self,
        store: Path,
        name: str = "rollout-0",
        *,
        clock: Clock | None = None,
        speed: Speed | None = None,
        lengths: Lengths | None = None,
        load_s: float = 0.0,
        keep: bool = True,
        **settings: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.speed = speed or Speed()
        self.lengths = lengths or Lengths()
        self.load_s = load_s
        #: Seconds between the last token before a pause and the first after it, of each pause under running responses.
        self.gaps: list[float] = []
        self._streams: dict[int, _Drawing] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._paused_at: float | None = None
        self._cleared = True  # whether the last pause cleared the cache
        self.model = EngineModel(self.speed, self._report)
        super().__init__(store, name, **settings)
        self.keep = keep

    async def start(self) -> None:
        """Starts a process: a new incarnation with the base weights and nothing in its slots."""
        await super().start()
        self.model = EngineModel(self.speed, self._report, self.version, self.clock.now())
        self._streams = {}

    async def kill(self) -> None:
        """Ends the process: requests are lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await super().kill()

    # Routes -----------------------------------------------------------------------------------------------------------

    async def _route(self, path: str, request: Request, fault: Fault | None) -> dict[str, Any]:
        if path == "/update_weights":
            await self.clock.sleep(self.load_s)
        answer = await super()._route(path, request, fault)
        now = self.clock.now()
        if path == "/finish_weight_update":
            self.model.update(self.version, now)
        elif path == "/resume":
            if self._paused_at is not None and self.model.running:
                if self._cleared:
                    self.model.clear_cache(now)
                self.gaps.append(self.model.next_token_s(now) + now - self._paused_at)
            self._paused_at = None
            self.model.resume(now)
            self._arm()
        return answer

    def _stopped(self, clear_cache: bool) -> None:
        """Called when decoding stands still."""
        now = self.clock.now()
        self._paused_at, self._cleared = now, clear_cache
        self.model.pause(now)
        self._arm()
        super()._stopped(clear_cache)

    def _flush(self) -> None:
        for drawing in self._streams.values():
            if drawing.request.flush_tokens:
                drawing.send(self.model.tokens_of(drawing.stream))

    # Sampling ---------------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request, fault: Fault | None) -> Any:
        if fault and fault.kind == "late":
            await asyncio.sleep(fault.delay)
        await self._open.wait()
        drawing = _Drawing(request, self._length(request))
        self._running.add(request.order)
        self._streams[request.order] = drawing
        try:
            self.model.add(drawing.stream, self.clock.now())
            self._arm()
            await drawing.ended
        except ValueError as error:
            raise Refused(400, str(error)) from error
        except asyncio.CancelledError:
            self.model.remove(drawing.stream, self.clock.now())
            self._arm()
            raise
        finally:
            self._streams.pop(request.order, None)
            self._running.discard(request.order)
            if not self._running:
                async with self._idle:
                    self._idle.notify_all()
        return drawing.answer(VLLM[self.vllm]["spans"])

    async def _answer(self, request: Request, fault: Fault | None) -> tuple[int, Any]:
        if request.path == "/metrics" and fault is None:
            model = self.model
            model.advance(self.clock.now())
            drawing = sum(model.tokens_of(stream) for stream in (*model.running, *model.waiting))
            text = telling.metrics(
                running=len(model.running),
                waiting=len(model.waiting),
                slots=self.speed.slots,
                drawn=model.tokens + drawing,
            )
            return 200, text.encode()
        return await super()._answer(request, fault)

    def _length(self, request: Request) -> int:
        limit = int(request.sampling["max_tokens"])
        name = request.request_id
        wanted = limit if request.sampling.get("ignore_eos") else self.lengths.of(name.partition(".")[2] or name)
        return max(1, min(limit, max(wanted, int(request.sampling.get("min_tokens") or 0))))

    def _report(self, stream: Stream, tokens: int) -> None:
        drawing = self._streams.get(int(stream.name))
        if drawing is None:
            return
        if tokens >= stream.length:
            if not drawing.ended.done():
                drawing.ended.set_result(None)
            return
        drawing.send(tokens)

    def _abort(self) -> None:
        """Gives up everything that runs or waits."""
        for drawing in list(self._streams.values()):
            if not drawing.ended.done():
                drawing.finish = "abort"
                self.model.remove(drawing.stream, self.clock.now())
                drawing.stream.length = drawing.stream.done = self.model.tokens_of(drawing.stream)
                drawing.ended.set_result(None)

    def _tick(self) -> None:
        self._timer = None
        self.model.advance(self.clock.now())
        self._arm()

    def _arm(self) -> None:
        """Sets the timer to when the model has something to say."""
        due = self.model.next_event()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self.clock.later(due - self.clock.now(), self._tick)


class _Drawing:
    """A request that is being answered."""

    def __init__(self, request: Request, length: int) -> None:
        self.request = request
        self.finish = "length" if length >= int(request.sampling["max_tokens"]) else "stop"
        context, flush = len(request.body.get("token_ids", ())), request.flush_tokens
        self.stream = Stream(str(request.order), context, length, mark=flush or length)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at = zlib.crc32(request.request_id.encode()) % (_POOL // 2)

    def send(self, tokens: int) -> None:
        """Lets the tokens so far leave, and asks to be told when the next part is due."""
        if tokens > self.request.sent:
            self.request.outbox.put_nowait(pack_frame(self.request.log.frame(self._frame(tokens))))
        self.stream.mark = self.request.sent + (self.request.flush_tokens or self.stream.length)

    def answer(self, counted: bool) -> Any:
        """The last frame, or vLLM's whole answer."""
        tokens = self.stream.length
        if self.request.framed:
            engine = self._spans(0, tokens) if counted else None
            last = replace(self._frame(tokens), finish_reason=self.finish, engine_versions=engine)
            return pack_frame(self.request.log.frame(last))
        ids, logprobs = self._tokens(0, tokens)
        content = [
            {"token_id": token, "logprob": value, "rank": 1}
            for token, value in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]
        spans = [{"version": s.version, "start": s.start, "end": s.end} for s in self._spans(0, tokens)]
        choice = {
            "index": 0,
            "finish_reason": self.finish,
            "stop_reason": None,
            "token_ids": ids.tolist(),
            "weight_versions": spans,
            "logprobs": {"content": content},
        }
        self.request.log.choice(choice)
        return {
            "request_id": f"generate-tokens-{self.request.request_id}",
            "model": "base",
            "usage": {"prompt_tokens": self.stream.context, "completion_tokens": tokens},
            "choices": [choice],
            "prompt_logprobs": None,
        }

    def _frame(self, tokens: int) -> Frame:
        start, self.request.sent = self.request.sent, tokens
        ids, logprobs = self._tokens(start, tokens)
        return Frame(self.request.request_id, start, ids, logprobs, self._spans(start, tokens))

    def _tokens(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        ids, logprobs = _IDS[self._at + start : self._at + end], _LOGPROBS[self._at + start : self._at + end]
        if end == self.stream.length and self.finish == "stop" and len(ids):
            ids = ids.copy()
            ids[-1] = EOS
        return ids, logprobs

    def _spans(self, start: int, end: int) -> list[VersionSpan]:
        spans = self.stream.spans
        ends = [first for _, first in spans[1:]] + [end]
        return [
            VersionSpan(version, max(first, start), min(last, end))
            for (version, first), last in zip(spans, ends, strict=True)
            if max(first, start) < min(last, end)
        ]
