"""Which weights sampled which token, against a record that is kept for each token."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nightshift.wire.experience import VersionSpan
from services.rollout.versions import FIRST_VERSION, VersionTracker


def test_a_response_under_one_version_has_one_span() -> None:
    tracker = VersionTracker()
    tracker.open("a")
    assert tracker.spans("a", 0, 7) == [VersionSpan(FIRST_VERSION, 0, 7)]
    assert tracker.spans("a", 3, 3) == []


def test_the_boundary_is_where_the_update_began() -> None:
    tracker = VersionTracker("v1")
    tracker.open("a")
    tracker.updating({"a": 5})
    assert tracker.labelled("a", 6) == 5
    tracker.finished("v2", {"a": 6})
    assert tracker.spans("a", 0, 9) == [VersionSpan("v1", 0, 5), VersionSpan("v2", 5, 9)]
    assert tracker.spans("a", 6, 9) == [VersionSpan("v2", 6, 9)]


def test_a_name_without_an_update_counts_from_now() -> None:
    tracker = VersionTracker("v1")
    tracker.open("a")
    tracker.finished("v2", {"a": 3})
    assert tracker.spans("a", 0, 4) == [VersionSpan("v1", 0, 3), VersionSpan("v2", 3, 4)]


def test_the_same_name_twice_is_one_span() -> None:
    tracker = VersionTracker("v1")
    tracker.open("a")
    tracker.finished("v1", {"a": 3})
    assert tracker.spans("a", 0, 5) == [VersionSpan("v1", 0, 5)]


def test_after_a_broken_update_the_weights_are_unknown_until_the_next() -> None:
    tracker = VersionTracker("v1")
    tracker.open("a")
    tracker.updating({"a": 2})
    assert tracker.spans("a", 0, 4) == [VersionSpan("v1", 0, 2), VersionSpan("", 2, 4)]  # an end in between
    tracker.resuming()
    assert tracker.version == ""
    tracker.finished("v2", {"a": 5})
    assert tracker.spans("a", 0, 6) == [VersionSpan("v1", 0, 2), VersionSpan("", 2, 5), VersionSpan("v2", 5, 6)]


def test_a_resume_without_an_update_changes_nothing() -> None:
    tracker = VersionTracker("v1")
    tracker.open("a")
    tracker.resuming()
    assert tracker.version == "v1"
    assert tracker.spans("a", 0, 2) == [VersionSpan("v1", 0, 2)]


class Record(RuleBasedStateMachine):
    """Responses that gain tokens while updates begin, end and break off; each token's label is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = VersionTracker("0")
        self.version = "0"
        self.updating = False
        self.names = 0
        self.opened = 0
        self.labels: dict[str, list[str | None]] = {}  # None: sampled since the open update began
        self.handed: dict[str, list[str]] = {}  # labels that were handed out in frames

    def counts(self) -> dict[str, int]:
        return {key: len(labels) for key, labels in self.labels.items()}

    def settle(self, version: str) -> None:
        self.version, self.updating = version, False
        for labels in self.labels.values():
            labels[:] = [version if label is None else label for label in labels]

    @rule()
    def open(self) -> None:
        key = f"r{self.opened}"
        self.opened += 1
        self.labels[key], self.handed[key] = [], []
        self.tracker.open(key)

    @precondition(lambda self: self.labels)
    @rule(data=st.data(), tokens=st.integers(1, 4))
    def draw(self, data: st.DataObject, tokens: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.labels)))
        self.labels[key] += [None if self.updating else self.version] * tokens

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.labels)))
        start = len(self.handed[key])
        end = self.tracker.labelled(key, len(self.labels[key]))
        for span in self.tracker.spans(key, start, end):
            assert span.start == len(self.handed[key])
            self.handed[key] += [span.version] * (span.end - span.start)
        assert len(self.handed[key]) == max(start, end)

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.labels)))
        self.tracker.close(key)
        del self.labels[key], self.handed[key]

    @rule()
    def begin_update(self) -> None:
        self.tracker.updating(self.counts())
        self.updating = True

    @rule()
    def finish_update(self) -> None:
        self.names += 1
        self.tracker.finished(str(self.names), self.counts())
        self.settle(str(self.names))

    @rule()
    def resume(self) -> None:
        self.tracker.resuming()
        if self.updating:
            self.settle("")

    @invariant()
    def labels_are_the_record(self) -> None:
        assert self.tracker.version == self.version
        for key, labels in self.labels.items():
            found: list[str] = []
            for span in self.tracker.spans(key, 0, len(labels)):
                assert span.start == len(found) < span.end
                found += [span.version] * (span.end - span.start)
            assert found == [label or "" for label in labels]
            assert self.handed[key] == found[: len(self.handed[key])]  # what was handed out never changes


TestRecord = Record.TestCase
TestRecord.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
