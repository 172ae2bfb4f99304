"""Ledgers of runs, kept open: to open a database takes longer than to ask it."""

from __future__ import annotations

import threading
from collections import OrderedDict

from orchestrator.store.state import StateStore


class Ledgers:
    """Stores by the URL of their database.

    Args:
        most: stores that are kept; the one that was asked least recently is closed first. Whoever still asks it then
            gets its answer: its connection is closed behind that.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._stores: OrderedDict[str, StateStore] = OrderedDict()
        self._lock = threading.Lock()

    def store(self, url: str) -> StateStore:
        """The store of a database.

        Raises:
            OperationalError: the database does not answer.
        """
        with self._lock:
            if found := self._stores.get(url):
                self._stores.move_to_end(url)
                return found
        made = StateStore(url)  # outside the lock: a database that is away holds up its own readers alone
        with self._lock:
            kept = self._stores.setdefault(url, made)
            surplus = [] if kept is made else [made]
            while len(self._stores) > self._most:
                surplus.append(self._stores.popitem(last=False)[1])
        for store in surplus:
            store.close()
        return kept

    def forget(self, url: str) -> None:
        """Closes a store whose database is removed."""
        with self._lock:
            found = self._stores.pop(url, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """Closes all."""
        for url in list(self._stores):
            self.forget(url)
