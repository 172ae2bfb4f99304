"""``events.jsonl``: what a run tells the world, one JSON object a line."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

Event = dict[str, Any]

_RESERVED = frozenset({"time", "kind", "run_id"})
_POLL_S = 0.1
_CHUNK = 1 << 20
#: How long an event may wait for others.
_SOON_S = 0.1
#: Types of the fields that readers count on, where an event has them.
_NUMBER = (int, float)
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("time", "start", "end", "seconds"), _NUMBER),
    **dict.fromkeys(("step", "steps"), int),
    **dict.fromkeys(("metrics", "ledger", "attributes"), dict),
    "links": list,
}
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
#: Takes an eighth of that, and knows more types: for the many events, whose values are plain.
_QUICK = msgspec.json.Encoder()


class EventLog:
    """Appends events to a file. Several processes may append to one file: events are written whole.

    A line that a killed process left unfinished is closed first, so that it spoils no later event.
    """

    def __init__(self, path: str | Path, run_id: str, clock: Callable[[], float] = time.time) -> None:
        """Opens the file, and makes it where it does not exist. ``clock`` gives unix seconds."""
        self.path = Path(path)
        #: Called with each event after it was written, in its plain form; they must not raise.
        self.listeners: list[Callable[[Event], None]] = []
        self._run_id = run_id
        self._clock = clock
        self._held: list[bytes] = []  # lines that are not written yet
        self._told: list[Event] = []  # the same events, for the listeners
        self._timer: asyncio.TimerHandle | None = None
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, kind: str, **fields: Any) -> None:
        """Writes one event. Numbers that are not finite become null; numpy values become plain ones.

        Raises:
            ValueError: a field is named time, kind or run_id.
            TypeError: a value has no JSON form; the message names the field's type.
        """
        self._held.append(self._line(self._event(kind, fields)))
        self.flush()

    def append_soon(self, kind: str, **fields: Any) -> None:
        """Writes one event together with those that follow it: at the next :meth:`append`, or a moment later.

        For events of which there are many. Without a running event loop it is written at once.
        """
        event = self._event(kind, fields)
        try:
            line = _QUICK.encode(event) + b"\n"
        except (TypeError, ValueError, OverflowError):  # a value of numpy, half a surrogate pair, a very large integer
            line = self._line(event)
        else:
            self._tell(event)
        self._held.append(line)
        if self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(_SOON_S, self.flush)
            except RuntimeError:
                self.flush()

    def flush(self) -> None:
        """Writes what is held, in one go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        told, self._told = self._told, []
        data = b"".join(held) if self._fd >= 0 else b""
        while data:  # a regular file takes all at once; only a full disk or a signal leaves a rest
            data = data[os.write(self._fd, data) :]
        for event in told:
            for listener in self.listeners:
                listener(event)

    def _event(self, kind: str, fields: Event) -> Event:
        if clash := _RESERVED & fields.keys():
            raise ValueError(f"event {kind!r}: the fields {sorted(clash)} are set by the log")
        return {"time": self._clock(), "kind": kind, "run_id": self._run_id, **fields}

    def _line(self, event: Event) -> bytes:
        try:
            text = _ENCODER.encode(event)
        except (TypeError, ValueError):  # it holds something that JSON has no form of
            event = plain(event)
            text = _ENCODER.encode(event)
        self._tell(event)
        return (text + "\n").encode(errors="replace")  # lone surrogates have no UTF-8 form

    def _tell(self, event: Event) -> None:
        if self.listeners:
            self._told.append(event)

    def close(self) -> None:
        """Closes the file; closing twice is harmless."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NaN and infinities as None, numpy arrays as lists, paths as text.

    Raises:
        TypeError: there is no such form.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if callable(as_list := getattr(value, "tolist", None)):  # numpy arrays and scalars
        return plain(as_list())
    raise TypeError(f"a value of type {type(value).__name__} has no place in an event")


def read_events(path: str | Path) -> list[Event]:
    """All complete events of a file; an absent file has none.

    A line that is no JSON object is given back as a ``warning`` event; an unfinished last line is left out.
    """
    return list(follow_events(path, stop=lambda: True))


def follow_events(
    path: str | Path, stop: Callable[[], bool], *, offset: int = 0, poll_s: float = _POLL_S
) -> Iterator[Event]:
    """Events as they are written, from byte ``offset`` on; waits for a file that does not exist yet.

    Ends after ``stop`` has become true and everything written before that has been given out.
    """
    path = Path(path)
    rest, line = b"", 0
    while True:
        stopping = stop()  # asked before reading, so that what was written before it is not missed
        while chunk := _read(path, offset):
            offset += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for text in lines:
                line += 1
                if text.strip():
                    yield parse_line(text, f"{path.name}: line {line}")
        if stopping:
            return
        time.sleep(poll_s)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_CHUNK)
    except FileNotFoundError:
        return b""


def parse_line(text: bytes, where: str) -> Event:
    """One line as an event; a line that is none becomes a ``warning`` event that says ``where`` it is."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        event = None
    if isinstance(event, dict) and isinstance(event.get("kind"), str) and _fits(event):
        return event
    return {"time": None, "kind": "warning", "role": "events", "message": f"{where} is unreadable"}


def _fits(event: Event) -> bool:
    return all(value is None or name not in _TYPES or isinstance(value, _TYPES[name]) for name, value in event.items())
