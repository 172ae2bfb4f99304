"""Lengths of responses: a lognormal that is cut off, as a function of the sample's id alone. Pure."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a response: ``median * exp(sigma * N(0, 1))``, at least 1 and at most ``largest``.

    A sample has the same length in every run, whatever the timing, so that two runs that are compared do the same work.
    """

    median: float = 512.0
    sigma: float = 1.0
    largest: int = 8192

    def of(self, sample_id: str) -> int:
        """Length of one response."""
        return self.at(share_of(sample_id))

    def at(self, share: float) -> int:
        """The quantile, for a share in (0, 1)."""
        value = self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share))
        return min(self.largest, max(1, round(value)))

    @property
    def mean(self) -> float:
        """Mean of the distribution, cut off at ``largest`` (its mass lies there; rounding is left out)."""
        if not self.sigma:
            return min(self.median, self.largest)
        cut = math.log(self.largest / self.median) / self.sigma
        below = self.median * math.exp(self.sigma**2 / 2) * _NORMAL.cdf(cut - self.sigma)
        return below + self.largest * (1 - _NORMAL.cdf(cut))


def share_of(sample_id: str) -> float:
    """A uniform number in (0, 1) that belongs to this id."""
    digest = hashlib.blake2b(sample_id.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2.0**64
