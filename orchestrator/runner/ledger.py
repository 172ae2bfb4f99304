"""The ledger's rules: every prompt group is issued once and ends once. Pure; the store keeps it in SQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from nightshift.wire.errors import NightshiftError


class GroupState(StrEnum):
    """Where a prompt group is. ``RUNNING`` and ``READY`` are in flight; the others are ends."""

    RUNNING = "running"
    READY = "ready"
    TRAINED = "trained"
    DROPPED_STALE = "dropped_stale"
    DROPPED_FILTERED = "dropped_filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"


IN_FLIGHT = frozenset({GroupState.RUNNING, GroupState.READY})
#: Ends that count against the admission bound: the group took part, or will, in a step.
ACCEPTED = frozenset({GroupState.READY, GroupState.TRAINED})

_ALLOWED = {
    GroupState.RUNNING: frozenset(GroupState) - {GroupState.RUNNING, GroupState.TRAINED},
    GroupState.READY: frozenset(
        {GroupState.TRAINED, GroupState.DROPPED_STALE, GroupState.DROPPED_FILTERED, GroupState.CANCELLED}
    ),
}


class LedgerError(NightshiftError):
    """A group would be issued twice, trained twice, or end twice."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One prompt group in the books."""

    index: int  # issue order, from 0; the group id is derived from it
    row: int  # position of the prompt in its set
    epoch: int
    trace_id: str
    state: GroupState = GroupState.RUNNING
    step: int | None = None  # optimiser step that trained it
    lineage: int | None = None  # lineage of that step
    reason: str = ""
    oldest_version: str = ""
    newest_version: str = ""


@dataclass
class Ledger:
    """All groups of a run, with the equation that must hold at every moment."""

    records: dict[int, GroupRecord] = field(default_factory=dict)
    counts: Counter[GroupState] = field(default_factory=Counter)

    @classmethod
    def of(cls, records: Iterable[GroupRecord]) -> Ledger:
        """A ledger with these records."""
        ledger = cls()
        for record in records:
            ledger._put(record)
        return ledger

    @property
    def issued(self) -> int:
        """Groups issued so far."""
        return len(self.records)

    @property
    def in_flight(self) -> int:
        """Groups that have not ended."""
        return sum(self.counts[state] for state in IN_FLIGHT)

    @property
    def accepted(self) -> int:
        """Groups that were trained or are ready to be: what the admission bound counts beside the running ones."""
        return sum(self.counts[state] for state in ACCEPTED)

    @property
    def running(self) -> int:
        """Groups being generated or scored."""
        return self.counts[GroupState.RUNNING]

    def issue(self, record: GroupRecord) -> GroupRecord:
        """Enters a new group.

        Raises:
            LedgerError: the index was issued before, or leaves a gap.
        """
        if record.index != self.issued:
            raise LedgerError(f"group {record.index} issued where {self.issued} was next", role="orchestrator")
        self._put(record)
        return record

    def move(self, index: int, state: GroupState, **changes: object) -> GroupRecord:
        """Moves a group to ``state`` and notes the further ``changes`` in its record.

        Raises:
            LedgerError: the group is unknown, or has ended already.
        """
        record = self.records.get(index)
        if record is None:
            raise LedgerError(f"group {index} was never issued", role="orchestrator")
        if state not in _ALLOWED.get(record.state, frozenset()):
            raise LedgerError(f"group {index} is {record.state} and cannot become {state}", role="orchestrator")
        moved = replace(record, state=state, **changes)  # type: ignore[arg-type]
        self._put(moved)
        return moved

    def train(self, indices: Iterable[int], step: int, lineage: int) -> list[GroupRecord]:
        """Marks groups as trained by ``step``; all of them or, where one is not ready, none.

        Raises:
            LedgerError: a group is not ready.
        """
        indices = list(indices)
        counts = Counter(indices)
        for index in indices:
            record = self.records.get(index)
            if record is None or record.state is not GroupState.READY or counts[index] > 1:
                state = "unknown" if record is None else record.state
                raise LedgerError(f"group {index} is {state} and cannot be trained by step {step}", role="orchestrator")
        return [self.move(index, GroupState.TRAINED, step=step, lineage=lineage) for index in indices]

    def roll_back(self, step: int, ready: frozenset[int]) -> list[GroupRecord]:
        """Goes back to the commit of ``step``: groups that a later step trained are un-consumed.

        Such a group is ready again where its experience is still there and usable (``ready``), otherwise it runs
        again with the same index. Running and ready groups that are not in ``ready`` run again. Ends other than
        training stay. Returns the records that changed.
        """
        changed = []
        for record in list(self.records.values()):
            uncommitted = record.state is GroupState.TRAINED and (record.step or 0) > step
            if not uncommitted and record.state not in IN_FLIGHT:
                continue
            state = GroupState.READY if record.index in ready else GroupState.RUNNING
            moved = replace(record, state=state, step=None, lineage=None)
            if moved != record:
                self._put(moved)
                changed.append(moved)
        return changed

    def balance(self) -> dict[str, int]:
        """The equation's terms, by name."""
        terms = {"issued": self.issued, "in_flight": self.in_flight}
        for state in GroupState:
            if state not in IN_FLIGHT:
                terms[str(state)] = self.counts[state]
        return terms

    def check(self) -> None:
        """Checks ``issued = trained + dropped_stale + dropped_filtered + failed + cancelled + in_flight``.

        By its counters, whatever the number of groups: for each step.

        Raises:
            LedgerError: the books do not balance; the message holds the terms.
        """
        terms = self.balance()
        if terms["issued"] != sum(value for name, value in terms.items() if name != "issued"):
            raise LedgerError(f"the ledger is out of balance: {terms}", role="orchestrator")

    def recount(self) -> None:
        """Checks the equation, and its counters against each record: for each commit.

        Raises:
            LedgerError: the books do not balance, or a counter is wrong.
        """
        self.check()
        if Counter(record.state for record in self.records.values()) != +self.counts:
            raise LedgerError(
                f"the ledger's counters disagree with its records: {dict(self.counts)}", role="orchestrator"
            )

    def _put(self, record: GroupRecord) -> None:
        before = self.records.get(record.index)
        if before is not None:
            self.counts[before.state] -= 1
        self.records[record.index] = record
        self.counts[record.state] += 1
