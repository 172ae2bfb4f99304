"""When a rollout server may be used: for any order of events, only after a push that was proved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.runner.health import PROBE_LIMITS, Health, ServerState, probe_error, probe_failure

FP32 = PROBE_LIMITS["float32"]
BF16 = PROBE_LIMITS["bfloat16"]


class HealthMachine(RuleBasedStateMachine):
    """Requests fail, health checks go unanswered, pushes begin, are proved or fail, the server hangs, time passes.

    The model beside it is the rule itself: a server is used if and only if its last push was proved and nothing has
    happened to it since the push began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.health = Health()
        self.now = 0.0
        self.proved: str | None = None  # weights proved since anything went wrong
        self.push = False  # whether one is under way that a proof may count for
        self.retired = False

    @rule()
    def suspect(self) -> None:
        assert self.health.suspect() == (self.proved is not None)
        self.proved = None

    @rule()
    def unanswered(self) -> None:
        before = self.health.state
        if self.health.unanswered(self.now):
            assert before in (ServerState.SUSPECT, ServerState.STALE)
            assert self.health.state is ServerState.DEAD

    @rule()
    def answered(self) -> None:
        self.health.answered()
        assert self.health.state is not ServerState.DEAD

    @rule()
    def hangs(self) -> None:
        news = self.health.restarting(self.now)
        assert not (news and self.retired)
        self.proved, self.push = None, False

    @rule()
    def sleeps(self) -> None:
        self.health.asleep()
        self.proved, self.push = None, False
        assert not self.health.due(self.now + 1e9)  # only a push wakes it
        assert not self.health.unanswered(self.now)

    @rule()
    def pushing(self) -> None:
        self.health.pushing()
        self.proved, self.push = None, not self.retired

    @rule(step=st.integers(0, 5))
    def prove(self, step: int) -> None:
        used = self.health.proved(f"run/0/{step}")
        assert used == self.push
        if used:
            self.proved, self.push = f"run/0/{step}", False

    @precondition(lambda self: self.proved is None)
    @rule()
    def fail(self) -> None:
        self.health.failed(self.now)
        self.push = False
        assert not self.health.due(self.now)
        assert self.health.due(self.now + 10.0) or self.retired

    @precondition(lambda self: not self.retired)
    @rule(chance=st.integers(0, 9))
    def retire(self, chance: int) -> None:
        if chance == 0:
            self.health.retire()
            self.retired, self.proved, self.push = True, None, False

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def usable_only_when_proved(self) -> None:
        assert self.health.usable == (self.proved is not None)
        assert not (self.health.usable and self.health.due(self.now))
        if self.proved is not None:
            assert self.health.version == self.proved

    @invariant()
    def whoever_left_stays_away(self) -> None:
        assert (self.health.state is ServerState.RETIRED) == self.retired
        assert not (self.retired and self.health.due(self.now + 1e6))

    @invariant()
    def whoever_has_not_left_and_does_not_sleep_is_tried_again(self) -> None:
        asleep = self.health.state is ServerState.ASLEEP
        assert asleep or self.retired or self.health.usable or self.health.due(self.now + 10.0)


TestHealthMachine = HealthMachine.TestCase
TestHealthMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_new_server_is_stale_and_due() -> None:
    health = Health()
    assert health.state is ServerState.STALE
    assert health.due(0.0)


def test_pauses_grow_to_a_limit_and_start_again() -> None:
    health = Health()
    pauses = []
    for _ in range(6):
        health.failed(100.0)
        pauses.append(health.next_try - 100.0)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    health.pushing()
    assert health.proved("run/0/1")
    health.pushing()
    health.failed(100.0)
    assert health.next_try == 101.0


def test_a_proof_of_a_push_that_something_came_between_does_not_count() -> None:
    for event in (Health.retire, lambda health: health.restarting(0.0), lambda health: health.failed(0.0)):
        health = Health()
        health.pushing()
        event(health)
        assert not health.proved("run/0/1")
        assert not health.usable


def test_a_proof_without_a_push_does_not_count() -> None:
    assert not Health().proved("run/0/1")


def test_a_dead_server_that_answers_again_is_stale() -> None:
    health = Health()
    health.pushing()
    health.proved("run/0/1")
    health.suspect()
    assert health.unanswered(5.0)
    assert not health.unanswered(5.5)
    assert not health.due(5.5)
    assert health.due(6.0)
    health.answered()
    assert health.state is ServerState.STALE
    assert not health.usable


def test_a_server_that_nobody_starts_again_is_tried_again() -> None:
    health = Health()
    assert health.restarting(100.0)
    assert not health.restarting(101.0)
    assert not health.due(110.0)
    assert health.due(111.0)


def arrays(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_published_weights_pass_the_probe() -> None:
    expected, previous = arrays(-1.0, -2.0), arrays(-1.2, -2.3)
    assert probe_failure(expected + np.float32(1e-5), expected, previous, FP32) == ""


def test_o40_a_push_that_did_nothing_fails_the_probe() -> None:
    expected, previous = arrays(-1.0, -2.0), arrays(-1.0005, -2.0005)
    assert "changed them by 0.0005" in probe_failure(previous, expected, previous, FP32)


def test_o40_half_a_push_fails_the_probe() -> None:
    expected, previous = arrays(-1.0, -2.0), arrays(-1.001, -2.001)
    held = arrays(-1.0, -2.001)  # one half of the weights arrived
    assert probe_failure(held, expected, previous, FP32)


def test_a_change_below_the_resolution_is_no_proof_either_way() -> None:
    expected, previous = arrays(-1.0, -2.0), arrays(-1.00005, -2.00005)
    assert probe_failure(previous, expected, previous, FP32) == ""


def test_weights_of_another_model_fail_without_a_predecessor() -> None:
    assert probe_failure(arrays(-3.0, -4.0), arrays(-1.0, -2.0), None, FP32)


def test_rounding_of_bfloat16_passes_in_bfloat16_alone() -> None:
    expected = arrays(-1.0, -2.0)
    held = expected - np.float32(0.04)
    assert probe_failure(held, expected, None, BF16) == ""
    assert probe_failure(held, expected, None, FP32)


@pytest.mark.parametrize(("noise", "move"), [(0.0025, 0.14), (0.0025, 0.004), (0.0, 0.004)])
def test_a_server_is_measured_by_how_far_off_it_was_at_its_start(noise: float, move: float) -> None:
    """As on a GPU: kernels of server and trainer differ by more than a small update moves the log-probs."""
    previous = np.array([-1.0, -2.0, -3.0, -0.5], np.float32)
    expected = previous + np.float32(move) * np.array([1, -1, 1, -1], np.float32)
    rounding = np.float32(noise) * np.array([1, 1, -1, 1], np.float32)
    limits = FP32.above(probe_error(previous + rounding, previous))
    assert probe_failure(expected + rounding, expected, previous, limits) == ""
    assert bool(probe_failure(previous + rounding, expected, previous, limits)) == (move > 4 * noise)


def test_noise_never_hides_what_is_far_off() -> None:
    assert probe_failure(arrays(-1.0, -2.0), arrays(-1.02, -2.02), None, FP32.above(1.0))


def test_values_that_are_not_finite_fail() -> None:
    assert probe_failure(arrays(np.nan, -1.0), arrays(-1.0, -1.0), None, BF16)


def test_without_a_probe_nothing_is_said() -> None:
    assert probe_failure(arrays(), arrays(), None, FP32) == ""


@given(st.lists(st.floats(-5, -0.01), min_size=2, max_size=8), st.floats(0.002, 1.0), st.sampled_from([FP32, BF16]))
def test_a_visible_step_that_does_not_arrive_is_always_caught(values: list[float], move: float, limits: object) -> None:
    previous = np.array(values, np.float32)
    expected = previous - np.float32(move)
    visible = move > 2.1 * limits.resolution  # type: ignore[attr-defined]
    assert bool(probe_failure(previous, expected, previous, limits)) or not visible  # type: ignore[arg-type]
    assert probe_failure(expected, expected, previous, limits) == ""  # type: ignore[arg-type]
