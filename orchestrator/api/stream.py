"""A job's events as server-sent events. The id of an event is the place in the file behind it, so that any stream can
go on where another one broke off, also after a restart of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sse_starlette import ServerSentEvent

_CHUNK = 1 << 20
_POLL_S = 0.25
_ASK_S = 1.0


def read_from(path: Path, offset: int) -> list[tuple[int, bytes]]:
    """Complete lines from ``offset`` on, at most about a mebibyte: (place behind the line, line)."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_CHUNK)
            if data and b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return []
    lines = []
    *whole, _ = data.split(b"\n")
    for line in whole:
        offset += len(line) + 1
        lines.append((offset, line))
    return lines


def boundary(path: Path, offset: int) -> int:
    """The start of a line at or behind ``offset``: an id that no event had is taken to the next event."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if offset <= 0 or offset > size:
                return 0 if offset <= 0 else size
            file.seek(offset - 1)
            return offset if file.read(1) == b"\n" else offset + len(file.readline())
    except FileNotFoundError:
        return 0


class NoLongerError(Exception):
    """Who follows a stream may no longer: its token has expired or was revoked."""


async def events(
    path: Path,
    offset: int,
    kinds: frozenset[str],
    ended: Callable[[], bool],
    *,
    follow: bool,
    may: Callable[[], bool] = lambda: True,
) -> AsyncIterator[ServerSentEvent]:
    """Events from ``offset`` on, and as they are written until the job has ended.

    Args:
        kinds: only these kinds; empty: all.
        ended: whether no event comes any more; asked in a thread.
        follow: False ends the stream with what is there now.
        may: whether the caller may still see them; asked in a thread, once a second however much there is to tell.

    Raises:
        NoLongerError: the caller may not.
    """
    loop = asyncio.get_running_loop()
    asked, checked = -_ASK_S, loop.time()
    over = not follow
    while True:
        if loop.time() - checked >= _ASK_S:
            checked = loop.time()
            if not await asyncio.to_thread(may):
                raise NoLongerError
        behind, chosen = await asyncio.to_thread(_read_events, path, offset, kinds)
        for place, kind, line in chosen:
            yield ServerSentEvent(line, event=kind, id=str(place))
        if behind != offset:
            offset = behind
            continue
        if over:
            yield ServerSentEvent(json.dumps({"id": offset}), event="end", id=str(offset))
            return
        if loop.time() - asked >= _ASK_S:
            asked = loop.time()
            over = await asyncio.to_thread(ended)  # what was written before is read once more
            continue
        await asyncio.sleep(_POLL_S)


def _read_events(path: Path, offset: int, kinds: frozenset[str]) -> tuple[int, list[tuple[int, str, str]]]:
    """Place behind what was read, and the events in it that are wanted: (place behind, kind, line).

    In a thread as a whole: a mebibyte of JSON takes long enough to hold up every other answer.
    """
    chosen = []
    lines = read_from(path, offset)
    words = [kind.encode() for kind in kinds]
    for place, line in lines:
        if words and not any(word in line for word in words):  # most lines, at a fraction of what JSON takes
            continue
        kind = _kind(line)
        if kind is not None and (not kinds or kind in kinds):
            chosen.append((place, kind, line.decode(errors="replace")))
    return lines[-1][0] if lines else offset, chosen


def _kind(line: bytes) -> str | None:
    try:
        event: Any = json.loads(line)
    except ValueError:
        return None
    kind = event.get("kind") if isinstance(event, dict) else None
    return kind if isinstance(kind, str) and "\n" not in kind else None
