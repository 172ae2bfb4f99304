"""What a commit says about each prompt group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from orchestrator.runner.commit import Consumed
from orchestrator.runner.ledger import GroupRecord, GroupState, Ledger


def group(index: int, samples: int = 2) -> Any:
    return SimpleNamespace(index=index, samples=[None] * samples)


def test_every_issued_group_has_its_place() -> None:
    ledger = Ledger.of(GroupRecord(index, row=index, epoch=0, trace_id="") for index in range(6))
    for index in (0, 1, 2, 4):
        ledger.move(index, GroupState.READY)
    ledger.move(3, GroupState.FAILED)
    ledger.move(4, GroupState.DROPPED_STALE)
    consumed = Consumed()
    for step, index in ((7, 0), (8, 1)):
        ledger.train([index], step, 0)
        consumed.add(step, [group(index, samples=step - 6)], n=2, max_staleness=1)
    fields = consumed.fields(ledger)
    assert fields["issued"] == 6
    assert fields["consumed"] == {"7": [0], "8": [1]}
    assert fields["rules"] == {"7": {"n": 2, "max_staleness": 1}, "8": {"n": 2, "max_staleness": 1}}
    assert fields["incomplete"] == {"0": 1}
    assert fields["ended"] == {"dropped_stale": [4], "dropped_filtered": [], "failed": [3], "cancelled": []}
    assert fields["in_flight"] == [2, 5]
    assert fields["ledger"]["trained"] == 2
    assert consumed.indices == [0, 1]


def test_a_commit_begins_the_next_one() -> None:
    consumed = Consumed()
    consumed.add(1, [group(0, samples=1)], n=2, max_staleness=None)
    consumed.clear()
    fields = consumed.fields(Ledger())
    assert fields["consumed"] == fields["rules"] == fields["incomplete"] == {}
    assert consumed.indices == []
