"""Frames of the fake engine, whole or spoiled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nightshift.wire.experience import VersionSpan
from nightshift.wire.frames import Frame, pack_frame
from tests.fakes.faults import Fault

if TYPE_CHECKING:
    from tests.fakes.requests import Request


def spans(labels: list[str], start: int = 0) -> list[VersionSpan]:
    """Runs of equal labels from token ``start`` on."""
    found: list[VersionSpan] = []
    for at, version in enumerate(labels[start:], start):
        if found and found[-1].version == version:
            found[-1] = replace(found[-1], end=at + 1)
        else:
            found.append(VersionSpan(version, at, at + 1))
    return found


def _frame(request: Request, answered: str) -> Frame:
    start, request.sent = request.sent, len(request.tokens)
    return Frame(
        answered,
        start,
        np.array(request.tokens[start:], np.int32),
        np.array(request.logprobs[start:], np.float32),
        spans(request.labels, start),
    )


def part(request: Request) -> bytes:
    """A frame before the end, of what has not been sent."""
    return pack_frame(request.log.frame(_frame(request, request.request_id)))


def last(request: Request, answered: str, finish: str, counted: bool, fault: Fault | None) -> bytes:
    """The last frame.

    Args:
        counted: whether vLLM's own count of the versions comes with it.
    """
    frame = request.log.frame(replace(_frame(request, answered), finish_reason=finish))
    if counted:
        frame = replace(frame, engine_versions=spans(request.labels))
    kind = fault.kind if fault else ""
    # The end that vLLM's own streams have, also after an error.
    return b"data: [DONE]\n\n" if kind == "done" else pack_frame(_spoiled(frame, kind))


def _spoiled(frame: Frame, kind: str) -> Frame:
    logprobs, versions = frame.logprobs.copy(), frame.versions
    match kind:
        case "short_logprobs":
            return replace(frame, logprobs=logprobs[:-1])
        case "null_logprob":
            logprobs[0] = np.nan
        case "positive_logprob":
            logprobs[0] = 0.3
        case "zero_logprobs":
            logprobs[:] = 0
        case "no_versions":
            return replace(frame, versions=[])
        case "gap":
            return replace(frame, versions=[*versions[:-1], replace(versions[-1], end=versions[-1].end + 1)])
        case "unknown_version":
            return replace(frame, versions=_named(frame, "default"), engine_versions=None)
        case "null_version":
            return replace(frame, versions=_named(frame, ""))
        case "false_spans":
            return replace(frame, engine_versions=_named(frame, "another"))
        case "bad_finish":
            return replace(frame, finish_reason="odd")
        case "unfinished":
            return replace(frame, finish_reason="", engine_versions=None)
        case "strange_token":
            return replace(frame, ids=np.full_like(frame.ids, 1 << 20))
    return replace(frame, logprobs=logprobs)


def _named(frame: Frame, version: str) -> list[VersionSpan]:
    return [VersionSpan(version, frame.start, frame.end)]
