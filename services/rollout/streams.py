"""Responses that are being drawn: what of each has been sent, and when the next frame leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import numpy as np

from nightshift.wire.frames import FINISH_ERROR, Frame, pack_frame
from nightshift.wire.request_log import GONE
from services.rollout.compat import EngineRequest, Outcome
from services.rollout.request_log import ResponseLog
from services.rollout.versions import VersionTracker

logger = logging.getLogger("vllm.nightshift")

#: Seconds between two looks at what has been drawn, at least and at most: the pause grows while no frame is due. One
#: task looks at all responses: a task of each one that woke for each token would cost more than the rest of the route.
_LOOK_S, _LONGEST_LOOK_S = 0.03, 0.25


class Stream:
    """One response on its way to its client.

    Attributes:
        request_id: the client's name for it.
        refusal: status and text, where the request failed before any token of it was sent.
    """

    def __init__(
        self, request_id: str, request: EngineRequest, flush_tokens: int, tracker: VersionTracker, log: ResponseLog
    ) -> None:
        self.request_id = request_id
        self.log = log
        self.request = request
        self.flush_tokens = flush_tokens
        self.refusal: tuple[int, str] | None = None
        self.sent = 0
        self._tracker = tracker
        self._wake = asyncio.Event()
        self._run = asyncio.create_task(request.run())
        self._run.add_done_callback(lambda _: self._wake.set())

    @property
    def key(self) -> str:
        """Name of the request in the engine."""
        return self.request.request_id

    @property
    def streams(self) -> bool:
        """Whether frames leave before the end."""
        return self.flush_tokens > 0

    def wake(self, least: int) -> bool:
        """Lets a frame leave if so many labelled tokens wait; whether it does."""
        count = self.request.count()
        if count - self.sent < least or self._tracker.labelled(self.key, count) - self.sent < least:
            return False
        self._wake.set()
        return True

    async def frames(self) -> AsyncIterator[bytes]:
        """Packed frames; the last one has a finish reason. One empty item where there is a refusal."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._run.done():
                yield self._last()
                return
            end = self._tracker.labelled(self.key, self.request.count())
            if end > self.sent:
                frame = self._frame(end)
                self.sent = end
                yield pack_frame(self.log.frame(frame))

    async def stop(self) -> None:
        """Ends the request in the engine, if it still runs."""
        self._run.cancel()
        await asyncio.gather(self._run, return_exceptions=True)

    def _frame(self, end: int, outcome: Outcome | None = None) -> Frame:
        ids, logprobs = self.request.tokens(self.sent, end)
        return Frame(
            request_id=self.request_id,
            start=self.sent,
            ids=ids,
            logprobs=logprobs,
            versions=self._tracker.spans(self.key, self.sent, end),
            finish_reason=outcome.finish_reason if outcome else "",
            engine_versions=outcome.engine_versions if outcome else None,
        )

    def _last(self) -> bytes:
        try:
            return pack_frame(self.log.frame(self._frame(self.request.count(), self._run.result())))
        except (Exception, asyncio.CancelledError) as error:  # vLLM's own, of many kinds
            status, text = _refusal(error)
            if not self.sent:
                self.refusal = status, text
                return b""
            empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
            frame = Frame(self.request_id, self.sent, *empty, finish_reason=FINISH_ERROR, error=text)
            return pack_frame(self.log.frame(frame))


class Streams:
    """All responses that are being drawn, and the versions of their tokens."""

    def __init__(self) -> None:
        self.tracker = VersionTracker()
        self._streams: dict[str, Stream] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def requests(self) -> list[EngineRequest]:
        """The engine's side of each."""
        return [stream.request for stream in self._streams.values()]

    @property
    def salt(self) -> str:
        """What keeps a request that comes now from cached prefixes of earlier weights; "" before the first update."""
        return f"update-{self.tracker.updates}" if self.tracker.updates else ""

    def free_key(self, request_id: str) -> str:
        """A name for a request in the engine: its own, unless one of that name still runs."""
        key, number = request_id, 1
        while key in self._streams:
            number += 1
            key = f"{request_id}~{number}"
        return key

    def add(self, request_id: str, request: EngineRequest, flush_tokens: int, log: ResponseLog) -> Stream:
        """Starts a request."""
        self.tracker.open(request.request_id)
        stream = self._streams[request.request_id] = Stream(request_id, request, flush_tokens, self.tracker, log)
        if stream.streams and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())
        return stream

    async def remove(self, stream: Stream) -> None:
        """Forgets a request; one that still runs is ended."""
        try:
            await stream.stop()
        finally:
            stream.log.close(FINISH_ERROR if stream.refusal else GONE)
            self._streams.pop(stream.key, None)
            self.tracker.close(stream.key)

    def flush(self) -> None:
        """Lets everything leave that has been drawn."""
        for stream in self._streams.values():
            if stream.streams:
                stream.wake(1)

    def updating(self) -> None:
        """Weights are about to be received."""
        self.tracker.updating(self._counts())
        self.flush()

    def finished(self, version: str) -> None:
        """The weights are received and have this name."""
        self.tracker.finished(version, self._counts())
        self.flush()

    def resuming(self) -> None:
        """Decoding is about to go on."""
        self.tracker.resuming()
        if not self.tracker.version:
            logger.warning("a weight update broke off: tokens from here on carry no version until one is finished")

    def _counts(self) -> dict[str, int]:
        return {key: stream.request.count() for key, stream in self._streams.items()}

    async def _look(self) -> None:
        """Wakes the responses that have a whole frame; ends when none is left that has frames before its end."""
        pause = _LOOK_S
        with contextlib.suppress(asyncio.CancelledError):
            while streams := [stream for stream in self._streams.values() if stream.streams]:
                due = [stream.wake(stream.flush_tokens) for stream in streams]
                pause = _LOOK_S if any(due) else min(1.5 * pause, _LONGEST_LOOK_S)
                await asyncio.sleep(pause)


def _refusal(error: BaseException) -> tuple[int, str]:
    """Status and text for a request that failed: 400 where it is to blame itself."""
    text = f"{type(error).__name__}: {error}"
    status = getattr(error, "http_status", None)
    if status is not None:
        return int(status), text
    blamed = isinstance(error, ValueError) or any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__)
    return (400 if blamed else 500), text
