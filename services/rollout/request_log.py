"""Writes down what the server served, in its own process: see :mod:`nightshift.wire.request_log`.

An audit of a run believes these lines and not the runner: they are made of what leaves the server. Only the name of the
request is the client's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.wire.experience import VersionSpan
from nightshift.wire.frames import Frame
from nightshift.wire.request_log import GONE, Served, Taken, hash_ids, hashed, pack_line
from services.rollout.guard import Message, Send

logger = logging.getLogger("vllm.nightshift")

#: Where the log's path is taken from at start; without it nothing is written.
LOG_VARIABLE = "NIGHTSHIFT_REQUEST_LOG"
NAME_VARIABLE = "NIGHTSHIFT_SERVER_NAME"


#: Most bytes of the log in one answer.
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a log.

    Attributes:
        file: which file it is from: another one where the log was begun anew.
        size: bytes of that file.
        data: from the byte that was asked for.
    """

    file: str
    size: int
    data: bytes


class RequestLogger:
    """The log of one start of a server.

    Args:
        path: the file, appended to; None: nothing is written.
        server: name of the server.
        incarnation: which start of it.
        clock: unix seconds.
    """

    def __init__(
        self, path: Path | None, server: str = "", incarnation: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        self._server, self._incarnation, self._clock = server, incarnation, clock
        self._path = path
        self._file: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if os.fstat(self._file).st_size:
                os.write(self._file, b"\n")  # the start before may have been killed within a line
            self._write(None)

    @classmethod
    def of_environment(cls, incarnation_variable: str, environment: Mapping[str, str] = os.environ) -> RequestLogger:
        """The log that the launcher names in the environment."""
        path = environment.get(LOG_VARIABLE, "")
        name, incarnation = environment.get(NAME_VARIABLE, ""), environment.get(incarnation_variable, "")
        return cls(Path(path) if path else None, name, incarnation)

    @property
    def active(self) -> bool:
        """Whether anything is written."""
        return self._file is not None

    def close(self) -> None:
        """Ends the log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def taken(self, version: str) -> None:
        """Notes weights that the server computes with from here on."""
        self._write(Taken(version))

    def read(self, start: int | None) -> Piece:
        """Whole lines of the log from byte ``start`` on, as far as one answer goes; None: none, only where it ends."""
        if self._path is None:
            return Piece("", 0, b"")
        with self._path.open("rb") as file:
            # It is only ever appended to: its first line, which holds the time, says which file it is.
            name = hashlib.blake2b(file.readline(), digest_size=8).hexdigest()
            size = file.seek(0, os.SEEK_END)
            if start is None or start > size:
                return Piece(name, size, b"")
            file.seek(start)
            data = file.read(_PIECE)
            if not data.endswith(b"\n"):
                data = data[: data.rfind(b"\n") + 1]
            return Piece(name, size, data)

    def response(self, request_id: str, prompt_ids: Sequence[int]) -> ResponseLog:
        """The lines of one response."""
        return ResponseLog(self._write if self.active else None, request_id, prompt_ids)

    def _write(self, record: Served | Taken | None) -> None:
        if self._file is None:
            return
        line = pack_line(record, server=self._server, incarnation=self._incarnation, time=self._clock())
        try:
            # One call for the whole line: it is with the kernel before the tokens leave, whatever becomes of us.
            os.write(self._file, line)
        except OSError as error:
            logger.error("the request log cannot be written (%s): what is served from here on is not proven", error)
            self.close()


class ResponseLog:
    """Lines of one response; without ``write`` there are none."""

    def __init__(self, write: Callable[[Served], None] | None, request_id: str, prompt_ids: Sequence[int]) -> None:
        self._write = write
        self._request_id = request_id
        self._prompt = ("", 0) if write is None else (hash_ids(prompt_ids), len(prompt_ids))
        self._end, self._ended = 0, False

    def frame(self, frame: Frame) -> Frame:
        """Notes a frame that is about to leave, and gives it back."""
        self._note(frame.start, frame.ids, frame.versions, frame.finish_reason)
        return frame

    def choice(self, choice: Mapping[str, Any]) -> None:
        """Notes a whole answer of vLLM's own route.

        Raises:
            KeyError, TypeError, ValueError: the answer is none of its.
        """
        ids = np.asarray(choice["token_ids"] or [], np.int32)
        spans = [VersionSpan(str(s["version"]), s["start"], s["end"]) for s in choice.get("weight_versions") or []]
        self._note(0, ids, spans or [VersionSpan("", 0, len(ids))], str(choice["finish_reason"]))

    def close(self, finish: str = GONE) -> None:
        """Notes why a response has no end, where it has none."""
        if not self._ended:
            self._note(self._end, (), (), finish)

    def _note(self, start: int, ids: Any, versions: Sequence[VersionSpan], finish: str) -> None:
        self._end, self._ended = start + len(ids), bool(finish)
        if self._write is not None:
            self._write(Served(self._request_id, *self._prompt, start, hashed(ids, versions, start), finish))


class AnswerWatch:
    """A ``send`` that notes the answer of vLLM's own generate route before its end leaves."""

    def __init__(self, send: Send, log: RequestLogger, headers: Mapping[str, str], body: bytes) -> None:
        self._send = send
        self._status, self._parts = 500, [b""]
        self._response = _response(log, headers, body)

    async def __call__(self, message: Message) -> None:
        """Passes a message on."""
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
        elif self._response is not None and message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                self._note(self._response)
        await self._send(message)

    def close(self) -> None:
        """Notes that the client went away before the answer."""
        if self._response is not None and self._status < 300:
            self._response.close()

    def _note(self, response: ResponseLog) -> None:
        self._response = None
        if self._status >= 300:
            return
        try:
            for choice in json.loads(b"".join(self._parts))["choices"]:
                response.choice(choice)
        except (KeyError, TypeError, ValueError) as error:
            logger.error("an answer is not in the request log: %s: %s", type(error).__name__, error)


def _response(log: RequestLogger, headers: Mapping[str, str], body: bytes) -> ResponseLog | None:
    """The log of a response; None for a sequence that is only scored, and for a request that vLLM will refuse."""
    try:
        values = json.loads(body)
        if values["sampling_params"].get("prompt_logprobs") is not None:
            return None
        return log.response(headers.get("x-request-id", ""), values["token_ids"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
