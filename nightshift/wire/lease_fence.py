"""The fencing token of a lease on its way to a server, and the server's rule: never go back to an older lease.

A lease's number grows with each lease of its fleet. Numbers begin anew where a fleet is made anew (another database,
for instance), so that the moment at which the fleet was made stands before the number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

#: Header of a request that belongs to a lease.
HEADER = "x-nightshift-lease"
#: ``type`` of the error with which a server answers 409 to an older lease than it has seen.
LEASE_OVER = "lease_over"

_TEXT = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class LeaseFence:
    """Fencing token of a lease; of two leases of a server the greater one is newer.

    Attributes:
        epoch: when the fleet was made, in unix milliseconds.
        number: of the lease.
    """

    epoch: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a header's value.

        Raises:
            ValueError: it is none.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{HEADER} is {text[:50]!r}, expected EPOCH.NUMBER, two whole numbers")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


class Fence:
    """What a server remembers of the leases that it worked for. Pure.

    Attributes:
        newest: the greatest fencing token that was admitted; None: none yet.
    """

    def __init__(self) -> None:
        self.newest: LeaseFence | None = None

    def admits(self, lease: LeaseFence) -> bool:
        """Whether a request of this lease may pass; one that may is remembered."""
        if self.newest is not None and lease < self.newest:
            return False
        self.newest = lease
        return True

    def refusal(self, lease: LeaseFence) -> str:
        """Why a request of an older lease may not pass."""
        return (
            f"lease {lease} of this server is over: it works for lease {self.newest} now, "
            "and takes neither weights nor requests of an older one"
        )
