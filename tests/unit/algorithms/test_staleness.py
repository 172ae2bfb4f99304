"""The staleness bound, under any order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.algorithms.staleness import GroupAge, headroom, is_usable, plan_update, staleness


def _ages(*versions: int, first: int = 0) -> list[GroupAge]:
    return [GroupAge(version, first + place) for place, version in enumerate(versions)]


def _room(accepted: int, running: int, finished: int, eta: int | None, **more: int) -> int:
    return headroom(accepted=accepted, running=running, finished=finished, batch_size=4, max_staleness=eta, **more)


def test_admission_is_the_inequality_of_the_design() -> None:
    for finished in (0, 4, 8):
        for eta in (0, 1, 3):
            for busy in range(30):
                may_start = busy < finished + (eta + 1) * 4
                assert (_room(busy // 2, busy - busy // 2, finished, eta) > 0) == may_start


def test_admission_has_further_bounds() -> None:
    assert _room(0, 0, 0, 1) == 8
    assert _room(0, 0, 0, 1, max_in_flight=3) == 3
    assert _room(0, 5, 0, 1, max_in_flight=3) == 0
    assert _room(4, 0, 4, 3, steps_left=1) == 4
    assert _room(0, 2, 0, None, max_in_flight=5) == 3
    with pytest.raises(ValueError, match="max_in_flight"):
        _room(0, 0, 0, None)


def test_the_hard_check_looks_at_the_oldest_token() -> None:
    assert staleness(3, 5) == 2
    assert is_usable(3, 5, 2)
    assert not is_usable(3, 5, 1)
    assert is_usable(0, 99, None)
    assert not is_usable(6, 5, None)  # tokens of weights that do not exist yet


def test_too_few_ready_groups_wait_for_any() -> None:
    plan = plan_update(0, _ages(0), _ages(0, 0, first=1), batch_size=2, max_staleness=1)
    assert (plan.may_update, plan.batch, plan.wait_for, plan.drop) == (False, (), (), ())


def test_the_oldest_ready_groups_are_used_first() -> None:
    ready = _ages(2, 1, 2, 1)
    plan = plan_update(2, ready, [], batch_size=2, max_staleness=1)
    assert plan.batch == (ready[1], ready[3])


def test_an_update_waits_for_the_group_that_it_would_leave_too_old() -> None:
    slow, ready = _ages(0), _ages(1, 1, first=1)
    plan = plan_update(1, ready, slow, batch_size=2, max_staleness=1)
    assert not plan.may_update
    assert plan.wait_for == tuple(slow)
    assert plan_update(1, ready, slow, batch_size=2, max_staleness=2).may_update


def test_two_slow_groups_with_one_place_left_are_foreseen() -> None:
    # Looking one update ahead is not enough: two groups of version 0 with eta 2 need updates 1 and 2 between them.
    slow, fast = _ages(0, 0), _ages(1, first=2)
    plan = plan_update(1, fast, slow, batch_size=1, max_staleness=2)
    assert not plan.may_update
    assert plan.wait_for == (slow[0],)
    assert plan_update(1, [*fast, slow[0]], slow[1:], batch_size=1, max_staleness=2).batch == (slow[0],)


def test_drop_goes_ahead_and_names_what_it_leaves_too_old() -> None:
    slow, ready = _ages(0, 1), _ages(1, 1, first=2)
    plan = plan_update(1, ready, slow, batch_size=2, max_staleness=1, on_stale="drop")
    assert plan.batch == tuple(ready)
    assert plan.drop == (slow[0],)


def test_a_lowered_batch_size_drops_what_no_update_can_use_in_time() -> None:
    ready = _ages(0, 0, 0, 0)
    plan = plan_update(0, ready, [], batch_size=1, max_staleness=1)
    assert plan.batch == (ready[0],)
    assert plan.drop == (ready[2], ready[3])


def test_without_a_bound_nothing_waits_or_is_dropped() -> None:
    plan = plan_update(9, _ages(0, 0), _ages(0, first=2), batch_size=2, max_staleness=None)
    assert (len(plan.batch), plan.wait_for, plan.drop) == (2, (), ())


def test_iterators_may_be_given() -> None:
    plan = plan_update(0, iter(_ages(0, 0)), iter(_ages(0, first=2)), batch_size=2, max_staleness=1)
    assert plan.batch == tuple(_ages(0, 0))


@dataclass
class _Run:
    """A run whose groups finish, are filtered and get newer tokens in any order."""

    batch: int
    eta: int
    on_stale: str
    version: int = 0
    issued: int = 0
    finished: int = 0
    trained: int = 0
    dropped: int = 0
    filtered: int = 0
    running: dict[int, int] = field(default_factory=dict)  # order -> version at start
    ready: dict[int, int] = field(default_factory=dict)  # order -> version of the oldest token
    used: list[int] = field(default_factory=list)  # staleness of each trained group

    def start(self) -> bool:
        room = headroom(
            accepted=self.trained + len(self.ready),
            running=len(self.running),
            finished=self.finished,
            batch_size=self.batch,
            max_staleness=self.eta,
        )
        if not room:
            return False
        self.running[self.issued] = self.version
        self.issued += 1
        return True

    def finish(self, pick: int, *, keep: bool, newer: bool) -> None:
        order = sorted(self.running)[pick % len(self.running)]
        version = self.running.pop(order)
        if not keep:
            self.filtered += 1
        else:  # a group that waited for its first token until after an update is younger than its start
            self.ready[order] = self.version if newer else version

    def update(self) -> bool:
        plan = plan_update(
            self.version,
            [GroupAge(version, order) for order, version in self.ready.items()],
            [GroupAge(version, order) for order, version in self.running.items()],
            batch_size=self.batch,
            max_staleness=self.eta,
            on_stale=self.on_stale,  # type: ignore[arg-type]
        )
        for group in plan.drop:
            del (self.ready if group.order in self.ready else self.running)[group.order]
            self.dropped += 1
        if not plan.may_update:
            assert len(self.ready) < self.batch or all(group.order in self.running for group in plan.wait_for)
            assert len(self.ready) < self.batch or plan.wait_for
            return False
        assert len(plan.batch) == self.batch
        for group in plan.batch:
            self.used.append(self.version - self.ready.pop(group.order))
        self.trained += self.batch
        self.finished += self.batch
        self.version += 1
        return True


@settings(max_examples=300)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["wait", "drop"]),
    st.lists(st.tuples(st.sampled_from(["start", "finish", "filter", "newer", "update"]), st.integers(0, 20))),
)
def test_the_bound_holds_for_any_order_of_events(
    batch: int, eta: int, on_stale: str, events: list[tuple[str, int]]
) -> None:
    run = _Run(batch, eta, on_stale)
    for kind, pick in events:
        if kind == "start":
            run.start()
        elif kind == "update":
            run.update()
        elif run.running:
            run.finish(pick, keep=kind != "filter", newer=kind == "newer")
    # From here on everything that runs comes in, newest first: the run must not be stuck.
    before = run.version
    for _ in range(3):
        while run.start():
            pass
        while not run.update():
            assert run.running or run.start()
            if run.running:
                run.finish(len(run.running) - 1, keep=True, newer=False)
    assert run.version == before + 3
    assert all(0 <= age <= eta for age in run.used)
    assert run.issued == run.trained + run.dropped + run.filtered + len(run.running) + len(run.ready)
    if on_stale == "wait":
        assert run.dropped == 0
