"""The ledger's invariants, for any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from orchestrator.runner.ledger import IN_FLIGHT, GroupRecord, GroupState, Ledger, LedgerError

ENDS = [state for state in GroupState if state not in IN_FLIGHT and state is not GroupState.TRAINED]


def record(index: int) -> GroupRecord:
    return GroupRecord(index=index, row=index % 7, epoch=0, trace_id=f"{index:032x}")


class LedgerMachine(RuleBasedStateMachine):
    """Groups are issued, become ready, end, are trained, and the run goes back to commits."""

    indices = Bundle("indices")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.step = 0

    @rule(target=indices)
    def issue(self) -> int:
        return self.ledger.issue(record(self.ledger.issued)).index

    @rule(index=indices, state=st.sampled_from([GroupState.READY, *ENDS]))
    def move(self, index: int, state: GroupState) -> None:
        before = self.ledger.records[index].state
        try:
            self.ledger.move(index, state)
        except LedgerError:
            # Refused: an end is an end, and the records stay as they were.
            assert self.ledger.records[index].state is before
            assert before not in IN_FLIGHT or before is state is GroupState.READY or before is GroupState.READY

    @rule(count=st.integers(1, 4))
    def train(self, count: int) -> None:
        ready = [r.index for r in self.ledger.records.values() if r.state is GroupState.READY][:count]
        if ready:
            self.step += 1
            self.ledger.train(ready, self.step, 0)

    @rule(back=st.integers(0, 5), share=st.integers(0, 3))
    def roll_back(self, back: int, share: int) -> None:
        commit = max(0, self.step - back)
        kept = frozenset(index for index in self.ledger.records if index % 4 <= share)
        self.ledger.roll_back(commit, kept)
        self.step = commit
        assert all((r.step or 0) <= commit for r in self.ledger.records.values() if r.state is GroupState.TRAINED)
        in_flight = [r for r in self.ledger.records.values() if r.state in IN_FLIGHT]
        assert all((r.state is GroupState.READY) == (r.index in kept) for r in in_flight)

    @invariant()
    def balanced(self) -> None:
        self.ledger.recount()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_group_is_issued_once() -> None:
    ledger = Ledger.of([record(0)])
    with pytest.raises(LedgerError, match="group 0 issued where 1 was next"):
        ledger.issue(record(0))


def test_training_takes_all_groups_or_none() -> None:
    ledger = Ledger.of([record(0), record(1)])
    ledger.move(0, GroupState.READY)
    with pytest.raises(LedgerError, match="group 1 is running"):
        ledger.train([0, 1], 1, 0)
    assert ledger.records[0].state is GroupState.READY


def test_a_group_is_trained_once_in_a_lineage() -> None:
    ledger = Ledger.of([record(0)])
    ledger.move(0, GroupState.READY)
    ledger.train([0], 1, 0)
    with pytest.raises(LedgerError, match="group 0 is trained"):
        ledger.train([0], 2, 0)


def test_the_same_group_twice_in_one_step_is_refused() -> None:
    ledger = Ledger.of([record(0)])
    ledger.move(0, GroupState.READY)
    with pytest.raises(LedgerError):
        ledger.train([0, 0], 1, 0)


def test_a_planted_imbalance_is_found() -> None:
    ledger = Ledger.of([record(0), record(1)])
    ledger.counts[GroupState.FAILED] += 1
    with pytest.raises(LedgerError, match="out of balance"):
        ledger.check()
    with pytest.raises(LedgerError, match="out of balance"):
        ledger.recount()


def test_counters_that_balance_and_are_wrong_are_found_by_a_recount() -> None:
    ledger = Ledger.of([record(0), record(1)])
    ledger.counts[GroupState.RUNNING] -= 1
    ledger.counts[GroupState.FAILED] += 1
    ledger.check()
    with pytest.raises(LedgerError, match="disagree with its records"):
        ledger.recount()


@given(st.integers(0, 10), st.integers(0, 10))
def test_rolling_back_keeps_what_was_committed(trained: int, commit: int) -> None:
    ledger = Ledger()
    for index in range(trained):
        ledger.issue(record(index))
        ledger.move(index, GroupState.READY)
        ledger.train([index], index + 1, 0)
    ledger.roll_back(commit, frozenset())
    assert ledger.counts[GroupState.TRAINED] == min(trained, commit)
    assert ledger.running == max(0, trained - commit)
