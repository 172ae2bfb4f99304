"""The job state machine, by cases and by random histories."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.jobs.states import (
    ACTIVE,
    ENDED,
    MAX_VANISHED,
    WAITING,
    Call,
    Happening,
    JobState,
    StateConflictError,
    Status,
    Wish,
    ask,
    happening,
    observe,
    progressed,
)

S = JobState


@pytest.mark.parametrize(
    ("state", "call", "after"),
    [
        (S.QUEUED, Call.PAUSE, S.PAUSED),
        (S.QUEUED, Call.CANCEL, S.CANCELLED),
        (S.QUEUED, Call.RESUME, S.QUEUED),
        (S.RUNNING, Call.PAUSE, S.RUNNING),
        (S.RUNNING, Call.CANCEL, S.CANCELLING),
        (S.RUNNING, Call.RESUME, None),
        (S.RUNNING, Call.DELETE, None),
        (S.PAUSED, Call.PAUSE, S.PAUSED),
        (S.PAUSED, Call.RESUME, S.RESUMING),
        (S.PAUSED, Call.CANCEL, S.CANCELLED),
        (S.PAUSED, Call.DELETE, None),
        (S.CANCELLING, Call.CANCEL, S.CANCELLING),
        (S.CANCELLING, Call.PAUSE, None),
        (S.CANCELLING, Call.RESUME, None),
        (S.CANCELLED, Call.RESUME, S.RESUMING),
        (S.CANCELLED, Call.CANCEL, S.CANCELLED),
        (S.FAILED, Call.RESUME, S.RESUMING),
        (S.FAILED, Call.CANCEL, None),
        (S.FAILED, Call.DELETE, S.FAILED),
        (S.SUCCEEDED, Call.RESUME, None),
        (S.SUCCEEDED, Call.PAUSE, None),
        (S.SUCCEEDED, Call.DELETE, S.SUCCEEDED),
    ],
)
def test_calls_by_state(state: JobState, call: Call, after: JobState | None) -> None:
    if after is None:
        with pytest.raises(StateConflictError, match=f"the job is {state}") as caught:
            ask(Status(state), call)
        assert caught.value.state is state
    else:
        assert ask(Status(state), call).state is after


def test_a_pause_waits_for_the_checkpoint() -> None:
    asked = ask(Status(S.RUNNING), Call.PAUSE)
    assert (asked.state, asked.wish) == (S.RUNNING, Wish.PAUSE)
    assert observe(asked, Happening.INTERRUPTED) == Status(S.PAUSED)


def test_a_pause_that_comes_too_late_changes_nothing() -> None:
    assert observe(ask(Status(S.RUNNING), Call.PAUSE), Happening.DONE) == Status(S.SUCCEEDED)


def test_a_cancel_overrides_a_pause() -> None:
    status = ask(ask(Status(S.RUNNING), Call.PAUSE), Call.CANCEL)
    assert observe(status, Happening.INTERRUPTED) == Status(S.CANCELLED)


def test_a_killed_process_is_started_again_until_it_never_gets_anywhere() -> None:
    status = Status(S.RUNNING)
    for _ in range(MAX_VANISHED - 1):
        status = observe(status, Happening.VANISHED)
        assert status.state is S.RESUMING
        status = observe(observe(status, Happening.LAUNCHED), Happening.WORKS)
    assert observe(status, Happening.VANISHED).state is S.FAILED
    assert observe(progressed(status), Happening.VANISHED).state is S.RESUMING


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (0, Happening.DONE),
        (1, Happening.FAILED),
        (2, Happening.FAILED),
        (130, Happening.INTERRUPTED),
        (-9, Happening.VANISHED),
        (137, Happening.VANISHED),
        (None, Happening.VANISHED),
    ],
)
def test_exit_codes(code: int | None, what: Happening) -> None:
    assert happening(code) is what


class Histories(RuleBasedStateMachine):
    """Any order of calls and happenings: a model keeps whether a process exists."""

    def __init__(self) -> None:
        super().__init__()
        self.status = Status()
        self.process = False

    @rule(call=st.sampled_from(list(Call)))
    def call(self, call: Call) -> None:
        before = self.status
        try:
            self.status = ask(before, call)
        except StateConflictError:
            return
        if call is Call.DELETE:
            assert self.status == before
            assert before.state in ENDED
        assert ask(self.status, call) == self.status or call is Call.RESUME, "asking twice is asking once"

    @precondition(lambda self: self.status.state in WAITING)
    @rule()
    def launch(self) -> None:
        assert not self.process
        self.status = observe(self.status, Happening.LAUNCHED)
        self.process = True

    @precondition(lambda self: self.process)
    @rule(what=st.sampled_from([h for h in Happening if h is not Happening.LAUNCHED]))
    def happen(self, what: Happening) -> None:
        self.status = observe(self.status, what)
        self.process = what is Happening.WORKS

    @precondition(lambda self: self.process)
    @rule()
    def step(self) -> None:
        self.status = progressed(self.status)

    @precondition(lambda self: not self.process)
    @rule(what=st.sampled_from([h for h in Happening if h is not Happening.LAUNCHED]))
    def ghost(self, what: Happening) -> None:
        with pytest.raises(StateConflictError):
            observe(self.status, what)

    @invariant()
    def a_process_is_never_lost_or_doubled(self) -> None:
        assert self.process == (self.status.state in ACTIVE)

    @invariant()
    def a_wish_needs_a_process(self) -> None:
        assert self.status.wish is Wish.NONE or self.status.state in (S.STARTING, S.RUNNING)

    @invariant()
    def groups_of_states_are_disjoint(self) -> None:
        assert sum(self.status.state in group for group in (ENDED, WAITING, ACTIVE, {S.PAUSED})) == 1

    @invariant()
    def no_dead_end_but_success(self) -> None:
        if self.status.state in (S.PAUSED, S.CANCELLED, S.FAILED):
            assert ask(self.status, Call.RESUME).state is S.RESUMING
        assert self.status.vanished <= MAX_VANISHED


Histories.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase
