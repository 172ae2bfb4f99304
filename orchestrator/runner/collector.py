"""Puts the frames of one response together, and checks them as they come. Arrays only, nothing per token."""

from __future__ import annotations

import math

import numpy as np

from nightshift.wire.errors import WireError
from nightshift.wire.experience import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Floats, Ids, VersionSpan
from nightshift.wire.frames import FINISH_ERROR, UNKNOWN_VERSION, Frame, FrameReader
from orchestrator.runner.answers import ROUNDING, EngineAwayError, Generated, InvalidAnswerError, check_length

_ZERO = np.float32(0)
#: As the methods of arrays, which ask for an axis, a place and a start first.
_least, _most = np.minimum.reduce, np.maximum.reduce


class Collector:
    """The response to one request, from the rollout route.

    Args:
        most: tokens that were asked for; None: any number.
    """

    def __init__(self, request_id: str, most: int | None = None) -> None:
        self._request_id = request_id
        self._most = most
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self._tokens = 0

    def feed(self, data: bytes) -> None:
        """Takes bytes of the answer.

        Raises:
            InvalidAnswerError: a frame is malformed, of another request, not the next one, beyond the tokens that were
                asked for, or with log-probs or versions that cannot be.
        """
        try:
            frames = self._reader.feed(data)
        except WireError as error:
            raise InvalidAnswerError(f"{self._request_id}: {error.message}", "form") from error
        for frame in frames:
            self._check(frame)
            if not len(frame.ids) and not frame.last:
                continue  # there may be any number of them
            self._frames.append(frame)
            self._tokens = frame.end

    def partial(self) -> Generated | None:
        """What has come in, as far as its weights are known; None where that is nothing."""
        versions = self._versions()
        known = next((span.start for span in versions if span.version == UNKNOWN_VERSION), self._tokens)
        if not known:
            return None
        return Generated(
            response_ids=self._ids()[:known],
            logprobs=self._logprobs()[:known],
            versions=[span for span in versions if span.start < known],
            finish_reason=FINISH_ABORT,
        )

    def finish(self) -> Generated:
        """The whole response, at the end of the answer.

        Raises:
            InvalidAnswerError: it has no end or an unknown one, or its versions are unknown or not those that vLLM
                counted.
            EngineAwayError: the server gave up the request.
        """
        name = self._request_id
        if not self._frames or not self._frames[-1].last or self._reader.pending:
            raise InvalidAnswerError(
                f"{name}: the answer ends before the response does", "form", partial=self.partial()
            )
        last = self._frames[-1]
        if last.finish_reason == FINISH_ABORT:
            raise EngineAwayError(f"{name} was aborted by the server", partial=self.partial())
        if last.finish_reason == FINISH_ERROR:
            raise EngineAwayError(
                f"{name} failed in the server: {last.error or 'no reason given'}", partial=self.partial()
            )
        if last.finish_reason not in (FINISH_STOP, FINISH_LENGTH):
            raise InvalidAnswerError(f"{name}: finish reason {last.finish_reason!r}", "finish_reason")
        versions = self._versions()
        if any(span.version == UNKNOWN_VERSION for span in versions):
            raise InvalidAnswerError(
                f"{name}: a weight update broke off below it, what sampled its tokens is unknown",
                "version",
                partial=self.partial(),
            )
        if last.engine_versions is not None and _merged(last.engine_versions) != versions:
            raise InvalidAnswerError(
                f"{name}: version spans {versions}, vLLM counted {last.engine_versions}", "versions"
            )
        return Generated(self._ids(), self._logprobs(), versions, last.finish_reason)

    def _versions(self) -> list[VersionSpan]:
        return _merged([span for frame in self._frames for span in frame.versions])

    def _ids(self) -> Ids:
        frames = self._frames
        return frames[0].ids if len(frames) == 1 else np.concatenate([frame.ids for frame in frames])

    def _logprobs(self) -> Floats:
        frames = self._frames
        values = frames[0].logprobs if len(frames) == 1 else np.concatenate([frame.logprobs for frame in frames])
        capped: Floats = np.minimum(values, _ZERO)
        return capped

    def _check(self, frame: Frame) -> None:
        name = self._request_id
        if frame.request_id != name:
            raise InvalidAnswerError(f"asked for {name}, answered {frame.request_id!r}", "request_id")
        if self._frames and self._frames[-1].last:
            raise InvalidAnswerError(f"{name}: a frame after the last one", "form")
        if frame.start != self._tokens:
            raise InvalidAnswerError(f"{name}: a frame from token {frame.start} after {self._tokens} tokens", "form")
        check_length(name, frame.end, self._most)
        if len(frame.ids) and _least(frame.ids) < 0:
            raise InvalidAnswerError(f"{name}: a negative token id", "token_ids")
        if len(frame.logprobs) != len(frame.ids):
            raise InvalidAnswerError(f"{name}: {len(frame.logprobs)} log-probs for {len(frame.ids)} tokens", "logprobs")
        # Two passes that allocate nothing; a NaN is neither below the one bound nor above the other.
        if len(frame.ids) and not (_most(frame.logprobs) <= ROUNDING and _least(frame.logprobs) > -math.inf):
            wrong = ~(np.isfinite(frame.logprobs) & (frame.logprobs <= ROUNDING))
            value = float(frame.logprobs[wrong.argmax()])
            raise InvalidAnswerError(f"{name}: log-prob {value}", "logprobs")
        ends = [frame.start, *(span.end for span in frame.versions)]
        gap = any(span.start != at or span.end <= at for span, at in zip(frame.versions, ends, strict=False))
        if ends[-1] != frame.end or gap:
            raise InvalidAnswerError(
                f"{name}: version spans {frame.versions} for tokens {frame.start} to {frame.end}", "versions"
            )


def _merged(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Spans in which neighbours of one version are one; empty ones are left out."""
    merged: list[VersionSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(span.version, merged[-1].start, span.end)
        else:
            merged.append(span)
    return merged
