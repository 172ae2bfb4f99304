"""What a commit says about prompt groups: enough to account for each of them without the database. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.runner.group import Group
from orchestrator.runner.ledger import IN_FLIGHT, GroupState, Ledger


class Consumed:
    """Groups that the steps since the last commit trained, with the rules that held for each step."""

    def __init__(self) -> None:
        self._steps: dict[int, list[int]] = {}
        self._rules: dict[int, dict[str, int | None]] = {}
        self._incomplete: dict[int, int] = {}  # by index: its samples

    def add(self, step: int, groups: Sequence[Group], *, n: int, max_staleness: int | None) -> None:
        """Notes a step.

        Args:
            n: samples that a group should have.
            max_staleness: bound in policy versions that held for it.
        """
        self._steps[step] = [group.index for group in groups]
        self._rules[step] = {"n": n, "max_staleness": max_staleness}
        self._incomplete |= {group.index: len(group.samples) for group in groups if len(group.samples) != n}

    @property
    def indices(self) -> list[int]:
        """All these groups."""
        return [index for indices in self._steps.values() for index in indices]

    def fields(self, ledger: Ledger) -> dict[str, Any]:
        """Fields of the manifest.

        ``consumed`` and ``rules`` are by step, ``incomplete`` holds the samples of groups that had fewer than n;
        ``ended`` lists all groups of the run that ended without being trained, by how, and ``in_flight`` those that had
        not ended.
        """
        ended: dict[str, list[int]] = {
            str(state): [] for state in GroupState if state not in IN_FLIGHT and state is not GroupState.TRAINED
        }
        in_flight = []
        for record in ledger.records.values():
            if record.state in IN_FLIGHT:
                in_flight.append(record.index)
            elif record.state is not GroupState.TRAINED:
                ended[str(record.state)].append(record.index)
        return {
            "issued": ledger.issued,
            "ledger": ledger.balance(),
            "consumed": {str(step): list(indices) for step, indices in self._steps.items()},
            "rules": {str(step): rules for step, rules in self._rules.items()},
            "incomplete": {str(index): samples for index, samples in self._incomplete.items()},
            "ended": ended,
            "in_flight": in_flight,
        }

    def clear(self) -> None:
        """Begins anew, after a commit."""
        for noted in (self._steps, self._rules, self._incomplete):
            noted.clear()
