"""The request log of a rollout server: what it really served, one JSON object a line, beside and unknown to the runner.

It lies in the run's ``logs/requests-<server>.jsonl``. Each line has ``kind``, ``server``, ``incarnation`` and ``time``
(unix seconds); a restarted server appends:

* ``start``: the server was started.
* ``weights``: it took the weights ``version``, and computes with them from here on.
* ``tokens``: tokens of a response left for the client, from token ``start`` on: ``request`` (the client's id),
  ``prompt_tokens`` and ``prompt`` (number and hash of the ids that it was asked to go on from), ``spans`` as
  ``[[version, start, end, hash of the ids], ...]``, one for each version, and ``finish``: "" while more follow.

A line is written before its tokens leave, so that what a client holds of a server that was killed is in the log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nightshift.wire.errors import WireError
from nightshift.wire.experience import VersionSpan

#: ``finish`` of a response whose client went away; its line holds no tokens.
GONE = "gone"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a response, sampled with one version."""

    version: str
    start: int
    end: int
    hash: str


@dataclass(frozen=True, slots=True)
class Served:
    """Tokens of one response that left together."""

    request: str
    prompt: str  # hash of the ids before them: the prompt, and what another server had drawn of the response
    prompt_tokens: int
    start: int
    spans: tuple[Span, ...] = ()
    finish: str = ""  # "" while more follow
    server: str = ""
    incarnation: str = ""
    time: float = 0.0

    @property
    def end(self) -> int:
        """Tokens of the response up to the end of these."""
        return self.spans[-1].end if self.spans else self.start

    @property
    def sample(self) -> str:
        """The sample's id: the request's ("<run>.<group>.<slot>.<attempt>") without the run and the attempt."""
        parts = self.request.split(".")
        return ".".join(parts[-3:-1]) if len(parts) > 3 else self.request


@dataclass(frozen=True, slots=True)
class Taken:
    """Weights that a server took."""

    version: str
    server: str = ""
    incarnation: str = ""
    time: float = 0.0


@dataclass(slots=True)
class RequestLog:
    """All that the servers of a run wrote down.

    Attributes:
        served: in the order of each file.
        unreadable: lines that are no record, as ``file:line``; a killed server may leave half a line behind.
    """

    served: list[Served] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def log_path(logs: Path, server: str) -> Path:
    """The file of a server in the run's folder of logs."""
    return logs / f"requests-{server}.jsonl"


def hash_ids(*parts: npt.ArrayLike) -> str:
    """Hash of token ids, given in one or several pieces: BLAKE2b of them as little-endian int32, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(np.asarray(part, dtype="<i4").tobytes())
    return digest.hexdigest()


def hashed(ids: npt.ArrayLike, versions: Iterable[VersionSpan], start: int = 0) -> tuple[Span, ...]:
    """Version spans with the hash of their ids; ``ids`` are those from token ``start`` of the response on."""
    array = np.asarray(ids, np.int32)
    return tuple(
        Span(span.version, span.start, span.end, hash_ids(array[span.start - start : span.end - start]))
        for span in versions
        if span.end > span.start
    )


def pack_line(record: Served | Taken | None, *, server: str, incarnation: str, time: float) -> bytes:
    """One line of the log; None: the server was started."""
    values: dict[str, Any] = {} if record is None else asdict(record)
    if isinstance(record, Served):
        values["spans"] = [[span.version, span.start, span.end, span.hash] for span in record.spans]
    kind = {Served: "tokens", Taken: "weights"}.get(type(record), "start")
    values |= {"server": server, "incarnation": incarnation, "time": round(time, 6)}
    return json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"


def parse_line(line: bytes) -> Served | Taken | None:
    """Reads a line; None: the server was started.

    Raises:
        WireError: it is no record of the log.
    """
    try:
        values = json.loads(line)
        kind = values.pop("kind")
        if kind == "tokens":
            values["spans"] = tuple(Span(*span) for span in values["spans"])
            return Served(**values)
        if kind == "weights":
            return Taken(**values)
        if kind == "start":
            return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"no line of a request log: {error}") from error
    raise WireError(f"no line of a request log: kind {kind!r}")


def read_logs(logs: Path) -> RequestLog:
    """Reads the logs of all servers in a run's folder of logs."""
    found = RequestLog()
    for path in sorted(logs.glob("requests-*.jsonl")):
        found.files.append(path.name)
        with path.open("rb") as lines:
            _collect(found, path.name, lines)
    return found


def _collect(found: RequestLog, name: str, lines: Iterable[bytes]) -> None:
    for number, line in _numbered(lines):
        try:
            record = parse_line(line)
        except WireError:
            found.unreadable.append(f"{name}:{number}")
            continue
        if isinstance(record, Served):
            found.served.append(record)
        elif isinstance(record, Taken):
            found.taken.append(record)


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())
