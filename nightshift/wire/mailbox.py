"""Requests to a run that somebody drives step by step, and its answers: files in the run's folder, each by rename.

A run is driven so where ``session/`` stands in its folder. Requests have numbers from 1 on and are answered in order;
they are msgpack maps (:mod:`nightshift.wire.codec`) with the key ``kind``: "rollout" (rows), "step" (rollout),
"discard" (rollout) or "close".
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER, _REQUESTS, _ANSWERS = "session", "requests", "answers"


class Mailbox:
    """The mailbox of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._requests = run_dir / _FOLDER / _REQUESTS
        self._answers = run_dir / _FOLDER / _ANSWERS

    @property
    def exists(self) -> bool:
        """Whether the run is driven step by step."""
        return self._requests.is_dir()

    def make(self) -> None:
        """Makes the folders."""
        for folder in (self._requests, self._answers):
            folder.mkdir(parents=True, exist_ok=True)

    def post(self, request: bytes) -> int:
        """Adds a request; returns its number. One caller at a time."""
        number = max((int(path.stem) for path in self._requests.glob("[0-9]*.msgpack")), default=0) + 1
        _write(self._requests / f"{number:06d}.msgpack", request)
        return number

    def request(self, number: int) -> bytes | None:
        """The request with this number, or None."""
        return _read(self._requests / f"{number:06d}.msgpack")

    def reply(self, number: int, answer: bytes) -> None:
        """Answers a request."""
        _write(self._answers / f"{number:06d}.msgpack", answer)

    def answer(self, number: int) -> bytes | None:
        """The answer to a request, or None while there is none."""
        return _read(self._answers / f"{number:06d}.msgpack")

    def answered(self) -> int:
        """The last request that was answered; 0 for none."""
        return max((int(path.stem) for path in self._answers.glob("[0-9]*.msgpack")), default=0)


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
