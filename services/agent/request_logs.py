"""Copies what rollout servers of somebody else write down of this run into its folder, where the audit reads it.

A server on another host cannot write into the run's folder, so that its log (:mod:`nightshift.wire.request_log`) is
fetched while it goes on: from where it ended when this run began, since a long-lived server also serves other runs.
That of a server that the run is lent is fetched from a piece before its end, as it was when the lease was first seen.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from nightshift.wire.events import EventLog
from nightshift.wire.lease_file import LeasedServer
from nightshift.wire.request_log import log_path
from nightshift.wire.rollout import LOG_ID, LOG_SIZE, REQUESTS

_POLL_S = 2.0
_CALL_S = 10.0
#: Bytes before the end of the log of a server that was lent a moment ago: many times what it writes between two looks.
_BACK = 8 << 20


@dataclass(slots=True)
class _Place:
    """Up to where a server's log was copied: byte ``at`` of ``file``; "": nothing was asked yet.

    ``inside``: whether that may be within a line, whose rest is left out.
    """

    file: str = ""
    at: int = 0
    inside: bool = False


class RequestLogs:
    """Copies the logs of several servers from a thread of its own.

    Args:
        servers: entries of ``services.json``: name, url, token.
        logs: the run's folder of logs.
        lent: servers that the run has now and does not keep.
    """

    def __init__(
        self,
        servers: Sequence[dict[str, Any]],
        logs: Path,
        events: EventLog,
        lent: Callable[[], Sequence[LeasedServer]] = list,
    ) -> None:
        self._servers = list(servers)
        self._lent = lent
        self._had: dict[str, dict[str, Any]] = {}  # lent at the last look
        self._logs = logs
        self._events = events
        self._silent: set[str] = set()  # servers that keep no log, said once
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="request-logs", daemon=True)
        self._client = httpx.Client(timeout=_CALL_S, trust_env=False)

    def start(self) -> None:
        """Notes where the logs end now, and goes on from there."""
        self.copy()
        self._thread.start()

    def stop(self) -> None:
        """Copies what is left and ends."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CALL_S * 2)
        self.copy()
        self._client.close()

    def copy(self) -> None:
        """One round over all servers; one that is away is asked again in the next."""
        try:
            now = {one.name: {"name": one.name, "url": one.url, "token": one.token} for one in self._lent()}
        except (OSError, ValueError, TypeError):
            now = self._had
        lent, self._had = {**self._had, **now}, now  # once more after it was given back
        for server in (*self._servers, *lent.values()):
            try:
                while self._copy(server):
                    pass
            except (httpx.HTTPError, ValueError, OSError):
                continue

    def _copy(self, server: dict[str, Any]) -> bool:
        """Copies a piece; whether there may be more."""
        name = server["name"]
        marks = self._logs / f".{name}.place"
        place = _Place(**json.loads(marks.read_text())) if marks.exists() else _Place()
        answer = self._client.get(
            f"{server['url'].rstrip('/')}{REQUESTS}",
            params={"from": place.at} if place.file else {},
            headers={"Authorization": f"Bearer {server['token']}"},
        )
        if answer.status_code != 200:
            if answer.status_code in (403, 404, 405) and name not in self._silent:
                self._silent.add(name)
                message = f"{name} at {server['url']} keeps no request log: `nightshift audit` cannot prove its tokens"
                self._events.append("warning", role="rollout", message=message)
            return False
        found, size = answer.headers[LOG_ID], int(answer.headers[LOG_SIZE])
        if place.file and found != place.file:
            place = _Place(found, 0)  # it was begun anew: all of it is of this run's time
        elif not place.file:
            back = min(size, _BACK) if name in self._had else 0
            place = _Place(found, size - back, inside=0 < back < size)
        elif answer.content:
            whole = answer.content.partition(b"\n")[2] if place.inside else answer.content
            with log_path(self._logs, name).open("ab") as file:
                file.write(whole)
            place.at, place.inside = place.at + len(answer.content), False
        else:
            return False
        part = marks.with_suffix(".tmp")
        part.write_text(json.dumps(asdict(place)))
        part.replace(marks)
        return place.at < size

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.copy()
