"""Policy versions: an opaque string on the wire, (run, lineage, step) to the run that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from nightshift.wire.errors import WireError


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Weights of ``run`` after ``step`` optimiser steps in ``lineage``.

    Going back to a checkpoint opens a new lineage, so that step 16 before and after are two policies.
    """

    run: str
    lineage: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``<run>/<lineage>/<step>``.

        Raises:
            WireError: the text has another form.
        """
        parts = text.split("/")
        if len(parts) != 3 or not parts[0] or not (parts[1].isdigit() and parts[2].isdigit()):
            raise WireError(f"policy version {text!r} is not <run>/<lineage>/<step>")
        return cls(parts[0], int(parts[1]), int(parts[2]))

    def __str__(self) -> str:
        return f"{self.run}/{self.lineage}/{self.step}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Ancestors of the current weights: ``(lineage, last step)`` of each branch that was left, oldest first.

    Example: a run that reached step 16, went back to 10 and is now in lineage 1 has ``branches=((0, 10),)``: version
    0/10 is an ancestor of the weights, 0/11 is not.
    """

    run: str
    number: int = 0
    branches: tuple[tuple[int, int], ...] = ()

    def version(self, step: int) -> PolicyVersion:
        """The version of this lineage at ``step``."""
        return PolicyVersion(self.run, self.number, step)

    def contains(self, version: PolicyVersion) -> bool:
        """Whether ``version`` is in the history of this lineage's weights."""
        if version.run != self.run:
            return False
        if version.lineage == self.number:
            return not self.branches or version.step >= self.branches[-1][1]
        first = 0
        for number, last in self.branches:
            if version.lineage == number:
                return first <= version.step <= last
            first = last
        return False

    def branch(self, number: int, step: int) -> Lineage:
        """The lineage ``number`` that goes back to ``step`` of this one."""
        kept = tuple(branch for branch in self.branches if branch[1] <= step)
        if len(kept) == len(self.branches):
            kept = (*kept, (self.number, step))
        else:  # the step lies in an older branch: what came after it is no ancestor any more
            older = self.branches[len(kept)]
            kept = (*kept, (older[0], step))
        return Lineage(self.run, number, kept)
