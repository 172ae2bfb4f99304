"""How many groups the servers get: within bounds for any readings, and right for an engine with so many slots."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.runner.load import Load
from orchestrator.runner.refill import Refill

N = 4
NAMES = ("a", "b", "c")
LOADS = st.builds(
    Load,
    running=st.floats(0, 1e4),
    waiting=st.floats(0, 1e5),
    kv_usage=st.floats(0, 1),
    preemptions=st.floats(0, 1e6),
    tokens=st.floats(0, 1e9),
)


class RefillMachine(RuleBasedStateMachine):
    """Any readings of any servers in any order, servers that leave and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.refill = Refill(N)
        self.seen: set[str] = set()

    @rule(name=st.sampled_from(NAMES), load=LOADS, in_flight=st.integers(0, 100_000))
    def observe(self, name: str, load: Load, in_flight: int) -> None:
        self.refill.observe(name, load, in_flight)
        self.seen.add(name)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        self.refill.forget(name)
        self.seen.discard(name)

    @invariant()
    def at_least_one_group_for_any_servers(self) -> None:
        for names in (NAMES, NAMES[:1], ()):
            limit = self.refill.limit(names)
            assert limit is None or limit >= 1
        assert self.refill.limit(()) is None

    @invariant()
    def a_server_is_never_shut_out(self) -> None:
        assert all(self.refill.room(name, N - 1) for name in NAMES)

    @invariant()
    def limited_says_whether_a_server_has_a_limit(self) -> None:
        assert self.refill.limited == any(self.refill.limit([name]) is not None for name in NAMES)

    @invariant()
    def who_said_nothing_has_no_limit(self) -> None:
        assert all(self.refill.limit([name]) is None for name in set(NAMES) - self.seen)

    @invariant()
    def metrics_are_finite(self) -> None:
        assert all(math.isfinite(value) for value in self.refill.metrics(NAMES).values())

    @rule()
    def a_quiet_engine_gives_everything_back(self) -> None:
        """Whatever happened before: where nothing waits and the window binds, it grows without an end."""
        for name in self.seen:
            before = self.refill.limit([name])
            if before is None:
                continue
            last = self.refill._windows[name].load
            quiet = Load(1.0, 0.0, 0.5, last.preemptions if last else 0.0, 0.0)
            self.refill.observe(name, quiet, before * N)
            after = self.refill.limit([name])
            assert after is None or after > before


TestRefillMachine = RefillMachine.TestCase
TestRefillMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class SlotEngine:
    """An engine that decodes so many requests at once; everything else waits."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def load(self, in_flight: int) -> Load:
        running = min(in_flight, self.slots)
        return Load(float(running), float(in_flight - running), running / self.slots * 0.8, 0.0, 0.0)


@given(st.integers(1, 400), st.integers(1, 2000))
@settings(deadline=None)
def test_the_slots_are_full_and_the_queue_is_short(slots: int, wanted: int) -> None:
    """``wanted`` groups are what the staleness bound allows; each reading finds as much as it and the window allow."""
    refill, engine, in_flight = Refill(N), SlotEngine(slots), wanted * N
    for _ in range(40):
        refill.observe("a", engine.load(in_flight), in_flight)
        limit = refill.limit(["a"])
        in_flight = wanted * N if limit is None else min(wanted, limit) * N
    load = engine.load(in_flight)
    assert load.running >= min(slots, wanted * N) - N
    assert load.waiting <= max(N, 0.25 * load.running) + N


def test_without_congestion_there_is_no_limit() -> None:
    refill = Refill(N)
    for in_flight in (0, 4, 32, 64):
        refill.observe("a", SlotEngine(64).load(in_flight), in_flight)
        assert refill.limit(["a"]) is None
        assert refill.room("a", in_flight)


def test_preemptions_cut_what_is_in_flight() -> None:
    refill = Refill(N)
    refill.observe("a", Load(100, 0, 0.97, 0, 0), 100)
    refill.observe("a", Load(100, 0, 0.99, 5, 0), 100)
    assert refill.limit(["a"]) == 17  # 70 requests
    refill.observe("a", Load(90, 0, 0.99, 9, 0), 90)  # not down to the window yet
    assert refill.limit(["a"]) == 17
    assert refill.metrics(["a"])["refill/preemptions"] == 9
    assert refill.metrics(["a"])["refill/preemptions"] == 0


def test_a_full_cache_lets_no_window_grow() -> None:
    refill = Refill(N)
    refill.observe("a", Load(64, 40, 0.5, 0, 0), 104)
    limit = refill.limit(["a"])
    assert limit is not None
    refill.observe("a", Load(64, 0, 0.95, 0, 0), limit * N)
    assert refill.limit(["a"]) == limit
    refill.observe("a", Load(64, 0, 0.6, 0, 0), limit * N)
    assert refill.limit(["a"]) > limit  # type: ignore[operator]


def test_a_window_that_does_not_bind_does_not_grow() -> None:
    refill = Refill(N)
    refill.observe("a", Load(64, 40, 0.5, 0, 0), 104)
    limit = refill.limit(["a"])
    for _ in range(5):
        refill.observe("a", Load(8, 0, 0.1, 0, 0), 8)
    assert refill.limit(["a"]) == limit


def test_a_restarted_server_begins_anew() -> None:
    refill = Refill(N)
    refill.observe("a", Load(4, 400, 0.5, 3, 0), 404)
    assert refill.limit(["a"]) is not None
    refill.forget("a")
    refill.observe("a", Load(4, 0, 0.5, 0, 0), 4)
    assert refill.limit(["a"]) is None


@pytest.mark.parametrize("adaptive", [True, False])
def test_fixed_is_without_a_limit(adaptive: bool) -> None:
    refill = Refill(N, adaptive=adaptive)
    refill.observe("a", Load(4, 400, 0.5, 3, 0), 404)
    assert (refill.limit(["a"]) is None) == (not adaptive)
    assert refill.room("a", 404) == (not adaptive)
    assert refill.metrics(["a"])["refill/waiting"] == 400
