"""When a rollout server may be used: for any order of events, only after a push that was proved."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.runner.health import PROBE_LIMITS, Health, ServerState, probe_failure

FP32 = PROBE_LIMITS["float32"]
BF16 = PROBE_LIMITS["bfloat16"]


class HealthMachine(RuleBasedStateMachine):
    """Requests fail, pushes begin, are proved or fail, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.health = Health()
        self.now = 0.0
        self.proved: str | None = None  # weights proved since anything went wrong

    @rule()
    def suspect(self) -> None:
        assert self.health.suspect() == (self.proved is not None)
        self.proved = None

    @rule()
    def pushing(self) -> None:
        self.health.pushing()
        self.proved = None

    @rule(step=st.integers(0, 5))
    def prove(self, step: int) -> None:
        self.health.proved(f"run/0/{step}")
        self.proved = f"run/0/{step}"

    @rule()
    def fail(self) -> None:
        self.health.failed(self.now)
        self.proved = None
        assert not self.health.due(self.now)
        assert self.health.due(self.now + 10.0)

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def usable_only_when_proved(self) -> None:
        assert self.health.usable == (self.proved is not None)
        assert not (self.health.usable and self.health.due(self.now))
        if self.proved is not None:
            assert self.health.version == self.proved


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
    health.proved("run/0/1")
    health.failed(100.0)
    assert health.next_try == 101.0


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
