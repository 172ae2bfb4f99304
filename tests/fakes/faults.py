"""What goes wrong, on request: each fault applies to the calls that it matches, a number of times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Fault:
    """One fault.

    Attributes:
        kind: what happens; the fake service says which kinds it knows.
        match: text that the call's name (request id, path, application or method) must hold.
        times: calls that it applies to; None: all.
        skip: matching calls that are let through first.
        delay: seconds, for kinds that wait.
        when: a further condition on the call's record.
    """

    kind: str
    match: str = ""
    times: int | None = 1
    skip: int = 0
    delay: float = 0.0
    when: Callable[[Any], bool] | None = None
    used: int = 0

    def takes(self, name: str, record: Any) -> bool:
        """Whether this call gets the fault; counts it."""
        if self.match not in name or (self.when is not None and not self.when(record)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.used >= self.times:
            return False
        self.used += 1
        return True


class Faults(list[Fault]):
    """The faults of one service; the first that matches applies."""

    def plan(self, kind: str, match: str = "", **fields: Any) -> Fault:
        """Adds a fault."""
        fault = Fault(kind, match, **fields)
        self.append(fault)
        return fault

    def take(self, name: str, record: Any = None) -> Fault | None:
        """The fault of this call, if any."""
        return next((fault for fault in self if fault.takes(name, record)), None)
