"""The weights that this process has published, in their order, and what may still be used of older ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np

from nightshift.wire.experience import Floats, VersionSpan
from orchestrator.runner.trainer import Publication


class Published:
    """Versions in the order of their publication.

    Attributes:
        current: the last one; None: there is none yet, or the next one is about to take its place.
    """

    def __init__(self) -> None:
        self.current: Publication | None = None
        self._order: dict[str, int] = {}

    def add(self, publication: Publication) -> None:
        """Makes a publication the current one."""
        self.current = publication
        self._order.setdefault(publication.version, len(self._order))

    async def release(self, pushing: Iterable[asyncio.Lock]) -> None:
        """Before a publication that overwrites the present one where it lies, as those inside GPUs do.

        No server is brought to the present one any more, and those that are being brought to it are waited for: they
        read it, and each phase of a push has a deadline.

        Args:
            pushing: of all servers; held while weights are brought to one.
        """
        if self.current is None or self.current.backend == "safetensors":
            return
        self.current = None
        for lock in pushing:
            async with lock:
                pass

    def place(self, version: str) -> int:
        """Place of a version in the order; -1: it was never published by this process."""
        return self._order.get(version, -1)

    def oldest(self, spans: Iterable[VersionSpan], default: int = 0) -> int:
        """Place of the oldest of the versions; -1 where one of them is unknown."""
        return min((self.place(span.version) for span in spans), default=default)

    def behind(self, spans: Iterable[VersionSpan]) -> int:
        """Publications since the oldest of the versions."""
        return len(self._order) - 1 - self.oldest(spans)


def probe_values(publication: Publication | None) -> Floats:
    """Log-probs [K] of the probe's tokens under published weights, by the trainer; empty where there is no probe."""
    if publication is None or not publication.probe:
        return np.zeros(0, np.float32)
    return np.concatenate([np.asarray(item["logprobs"], dtype=np.float32) for item in publication.probe])
