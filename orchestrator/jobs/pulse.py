"""Whether the servers of fleets answer: asked in the background, one thread for each that is slow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import httpx

_log = logging.getLogger(__name__)

#: Seconds between two questions, and for one answer.
_EVERY_S, _ANSWER_S = 2.0, 5.0
#: Answers in a row that fail to come before a server counts as gone: a push may keep one busy for a moment.
_MISSES = 3
_AT_ONCE = 16


class Pulse:
    """Health of servers by URL.

    Args:
        every_s: seconds between two questions to one server.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._urls: frozenset[str] = frozenset()
        self._misses: dict[str, int] = {}  # in a row; one that was not asked yet is not listed
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, urls: Iterable[str]) -> None:
        """Asks these servers from now on; the first call starts it."""
        self._urls = frozenset(urls)
        if self._thread is None and self._urls:
            self._thread = threading.Thread(target=self._run, name="fleet-pulse", daemon=True)
            self._thread.start()

    def healthy(self, url: str, *, unasked: bool = False) -> bool:
        """Whether a server answers; ``unasked``, where it was not asked yet."""
        misses = self._misses.get(url)
        return unasked if misses is None else misses < _MISSES

    def close(self) -> None:
        """Ends it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_ANSWER_S + 1)

    def _run(self) -> None:
        with httpx.Client(timeout=_ANSWER_S, trust_env=False) as client, ThreadPoolExecutor(_AT_ONCE) as pool:
            while not self._stop.is_set():
                urls = self._urls
                for url, answered in zip(urls, pool.map(lambda url: _answers(client, url), urls), strict=True):
                    # One that does not answer the first question was away before.
                    self._misses[url] = 0 if answered else self._misses.get(url, _MISSES) + 1
                for gone in self._misses.keys() - urls:
                    del self._misses[gone]
                self._stop.wait(self._every_s)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    except Exception:  # without this thread, no server would ever be lent again
        _log.exception("%s: its health could not be asked for", url)
        return False
