"""Which weights sampled which token: a state machine over the phases of a weight update. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nightshift.wire.experience import VersionSpan
from nightshift.wire.frames import UNKNOWN_VERSION

#: What vLLM calls the weights it was started with, before anybody names them.
FIRST_VERSION = "default"


class VersionTracker:
    """Labels the tokens of running responses.

    An update begins when the first weights are about to be received (:meth:`updating`), and from then on it is open:
    tokens after that have no label yet, and are not to be handed out. :meth:`finished` gives them the new version.
    Where decoding goes on without it (:meth:`resuming`), the update broke off, and what the weights are is unknown
    until the next one is finished. A label that was given never changes.

    Attributes:
        version: of the weights that the server holds; "" while unknown.
        updates: updates that have begun. Requests that came after different numbers of them share no cached prefix.
    """

    def __init__(self, version: str = FIRST_VERSION) -> None:
        self.version = version
        self.updates = 0
        self._starts: dict[str, list[tuple[str, int]]] = {}
        self._boundary: dict[str, int] | None = None  # tokens of each response when the open update began

    def open(self, key: str) -> None:
        """A response begins."""
        self._starts[key] = [(self.version, 0)]

    def close(self, key: str) -> None:
        """A response is over."""
        self._starts.pop(key, None)
        if self._boundary is not None:
            self._boundary.pop(key, None)

    def updating(self, counts: Mapping[str, int]) -> None:
        """Weights are about to be received; ``counts`` holds the tokens that each open response has."""
        if self._boundary is None:
            self.updates += 1
            self._boundary = {key: counts.get(key, 0) for key in self._starts}

    def finished(self, version: str, counts: Mapping[str, int]) -> None:
        """An update is finished, or the weights were given another name without one."""
        self.updating(counts)
        self._switch(version)

    def resuming(self) -> None:
        """Decoding goes on: an update that is still open broke off."""
        if self._boundary is not None:
            self._switch(UNKNOWN_VERSION)

    def labelled(self, key: str, count: int) -> int:
        """How many of the first ``count`` tokens have their label."""
        return count if self._boundary is None else min(count, self._boundary.get(key, 0))

    def spans(self, key: str, start: int, end: int) -> list[VersionSpan]:
        """Versions of the tokens [start, end) of a response; those after an open update began are unknown."""
        starts = list(self._starts[key])
        if self._boundary is not None:
            starts.append((UNKNOWN_VERSION, self._boundary.get(key, 0)))
        ends = [*(at for _, at in starts[1:]), end]
        spans: list[VersionSpan] = []
        for (version, first), last in zip(starts, ends, strict=True):
            first, last = max(first, start), min(last, end)
            if first >= last:
                continue
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, last)
            else:
                spans.append(VersionSpan(version, first, last))
        return spans

    def _switch(self, version: str) -> None:
        boundary, self._boundary = self._boundary or {}, None
        self.version = version
        for key, starts in self._starts.items():
            starts.append((version, boundary.get(key, 0)))
