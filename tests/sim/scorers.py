"""Simulated scorers: a latency for each call, and a rate that all calls share."""

from __future__ import annotations

from typing import Any

from tests.fakes.scorers import FakeScorers
from tests.sim.clock import Clock
from tests.sim.lengths import share_of


class SimScorers(FakeScorers):
    """Rewards behind one address: a uniform number for each sample, as slow as it is told to be.

    Args:
        latency_s: seconds from a call to its answer, as those of a remote judge: calls do not wait for one another.
        sample_s: seconds of work on one sample, one after the other over all calls; 0: none.
    """

    def __init__(self, clock: Clock, *, latency_s: float = 0.0, sample_s: float = 0.0, keep: bool = False) -> None:
        super().__init__()
        self.clock = clock
        self.latency_s = latency_s
        self.sample_s = sample_s
        self.keep = keep
        self.samples = 0
        self.reward = _reward
        self._free = 0.0  # when the work that was asked for is done, simulated seconds

    async def _work(self, samples: int) -> None:
        self.samples += samples
        now = self.clock.now()
        self._free = max(now, self._free) + samples * self.sample_s
        if delay := self._free - now + self.latency_s:
            await self.clock.sleep(delay)


def _reward(sample: dict[str, Any]) -> float:
    return share_of(sample["id"])
