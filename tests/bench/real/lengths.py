"""Forced response lengths, lognormal, the same for the same sample in every arm. Standard library."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Self

#: The environment variable that carries the distribution to the middleware.
VARIABLE = "NIGHTSHIFT_BENCH_LENGTHS"
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Lengths ``min(longest, max(1, round(x)))`` of a lognormal ``x``.

    Attributes:
        mean: mean of ``min(longest, x)`` in tokens, below ``longest``.
        sigma: standard deviation of ``ln x``.
        longest: tokens.
        seed: another seed gives the samples other lengths.
    """

    mean: float = 64.0
    sigma: float = 1.0
    longest: int = 256
    seed: int = 0

    @cached_property
    def median(self) -> float:
        """Median of ``x`` in tokens; found by bisection, since the mean of what is cut rises with it."""
        low, high = 0.01, float(self.longest) * 1e3
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return math.sqrt(low * high)

    def _cut_mean(self, median: float) -> float:
        """Mean of ``min(longest, x)``: the partial expectation of a lognormal, and the mass above the cut."""
        if not self.sigma:
            return min(self.longest, median)
        at = (math.log(self.longest) - math.log(median)) / self.sigma
        below = median * math.exp(self.sigma**2 / 2) * _NORMAL.cdf(at - self.sigma)
        return below + self.longest * (1 - _NORMAL.cdf(at))

    def of(self, sample: str) -> int:
        """Tokens of a sample, by its name."""
        digest = hashlib.blake2b(f"{self.seed}/{sample}".encode(), digest_size=8).digest()
        share = (int.from_bytes(digest, "big") + 0.5) / 2**64
        return min(self.longest, max(1, round(self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share)))))

    def batch(self, step: int, prompts: int, samples: int) -> list[int]:
        """Tokens of the samples of a batch, where batches take groups in the order of their numbers."""
        first = step * prompts
        return [self.of(name(group, slot)) for group in range(first, first + prompts) for slot in range(samples)]

    def to_text(self) -> str:
        """As the environment carries it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads what :meth:`to_text` wrote."""
        return cls(**json.loads(text))


def name(group: int, slot: int) -> str:
    """The name of a sample, as the runner gives it."""
    return f"g{group:07d}.{slot}"
