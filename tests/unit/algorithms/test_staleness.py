"""The staleness bound, under any order of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nightshift.algorithms.staleness import GroupAge, PartPlan, headroom, is_usable, left_behind, plan_part, staleness


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


def _plan(
    step: int, ready: Iterable[GroupAge], running: Iterable[GroupAge], *, batch: int, eta: int | None, **more: Any
) -> PartPlan:
    """A plan for an update whose places are all free, where ``more`` says nothing else."""
    versions = Counter(group.oldest_version for group in running)
    return plan_part(step, ready, versions, batch_size=batch, max_staleness=eta, **{"places": batch, **more})


def test_the_oldest_ready_groups_are_used_first() -> None:
    ready = _ages(2, 1, 2, 1)
    assert _plan(2, ready, [], batch=2, eta=1).take == (ready[1], ready[3])
    assert _plan(2, ready, [], batch=3, eta=1).take == (ready[1], ready[3], ready[0])


def test_what_is_ready_is_taken_before_the_batch_is_there() -> None:
    slow, ready = _ages(0, 0), _ages(0, 0, first=2)
    assert _plan(0, ready, slow, batch=4, eta=0) == PartPlan(take=tuple(ready))
    assert _plan(0, ready, slow, batch=4, eta=0, places=1) == PartPlan(take=(ready[0],))


def test_a_group_is_held_back_by_the_one_that_it_would_leave_too_old() -> None:
    slow, ready = _ages(0), _ages(1, 1, first=1)
    assert _plan(1, ready, slow, batch=2, eta=1) == PartPlan(take=(ready[0],), held_by=0)
    assert _plan(1, ready, slow, batch=2, eta=1, places=1) == PartPlan(held_by=0)
    assert _plan(1, ready, slow, batch=2, eta=2) == PartPlan(take=tuple(ready))


def test_two_slow_groups_with_one_place_left_are_foreseen() -> None:
    # Looking one update ahead is not enough: two groups of version 0 with eta 2 need updates 1 and 2 between them.
    slow, fast = _ages(0, 0), _ages(1, first=2)
    assert _plan(1, fast, slow, batch=1, eta=2) == PartPlan(held_by=0)
    assert _plan(1, [*fast, slow[0]], slow[1:], batch=1, eta=2).take == (slow[0],)


def test_drop_goes_ahead_and_names_what_it_leaves_too_old() -> None:
    slow, ready = _ages(0, 1), _ages(1, 1, first=2)
    assert _plan(1, ready, slow, batch=2, eta=1, on_stale="drop") == PartPlan(take=tuple(ready))
    assert left_behind(1, slow, batch_size=2, max_staleness=1, on_stale="drop") == [slow[0]]


def test_what_is_too_old_already_is_named() -> None:
    old, ready = _ages(0, 0, 3), _ages(0, 3, first=3)
    assert _plan(3, ready, old, batch=2, eta=1) == PartPlan(take=(ready[1],), drop=(ready[0],), late=frozenset({0}))


def test_a_lowered_batch_size_drops_what_no_update_can_use_in_time() -> None:
    ready = _ages(0, 0, 0, 0)
    assert _plan(0, ready, [], batch=1, eta=1) == PartPlan(take=(ready[0],))
    assert left_behind(0, ready[1:], batch_size=1, max_staleness=1) == [ready[2], ready[3]]
    # Two groups are lost anyway: a younger one is not held back for them, unless a third were lost by it.
    young = _ages(1, first=4)
    assert _plan(1, young, ready, batch=1, eta=1).held_by == 0
    assert _plan(1, young, ready[:1], batch=2, eta=1).take == tuple(young)


def test_without_a_bound_nothing_waits_or_is_dropped() -> None:
    ready, slow = _ages(0, 0), _ages(0, first=2)
    assert _plan(9, ready, slow, batch=2, eta=None) == PartPlan(take=tuple(ready))
    assert left_behind(9, slow, batch_size=2, max_staleness=None) == []


def test_iterators_may_be_given() -> None:
    assert _plan(0, iter(_ages(0, 0)), iter(_ages(0, first=2)), batch=2, eta=1).take == tuple(_ages(0, 0))


def _lost(groups: list[GroupAge], places: int, batch: int, eta: int) -> int:
    """Groups without an update, one after the other by age, where update 0 has so many places left."""
    used: Counter[int] = Counter()
    lost = 0
    for group in sorted(groups):
        deadline = group.oldest_version + eta
        step = next((step for step in range(deadline + 1) if used[step] < (batch if step else places)), None)
        lost += step is None
        if step is not None:
            used[step] += 1
    return lost


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(-3, 0), st.booleans()), max_size=12), st.integers(1, 3), st.integers(3, 4))
def test_as_many_are_taken_as_can_be_without_losing_another(
    groups: list[tuple[int, bool]], batch: int, eta: int
) -> None:
    ages = [GroupAge(version, order) for order, (version, _) in enumerate(groups)]
    ready = sorted(age for age, (_, done) in zip(ages, groups, strict=True) if done)
    running = [age for age, (_, done) in zip(ages, groups, strict=True) if not done]
    for places in range(1, batch + 1):
        take = _plan(0, ready, running, batch=batch, eta=eta, places=places).take
        before = _lost(ages, places, batch, eta)
        assert take == tuple(ready[: len(take)])
        rest = [age for age in ages if age not in take]
        assert _lost(rest, places - len(take), batch, eta) == before
        if len(take) < min(places, len(ready)):
            rest.remove(ready[len(take)])
            assert _lost(rest, places - len(take) - 1, batch, eta) > before


@dataclass
class _Run:
    """A run whose groups finish, are filtered and get newer tokens in any order; weights arrive late."""

    batch: int
    eta: int
    on_stale: str
    cap: int | None = None
    version: int = 0
    pushed: int = 0  # version on the servers
    made: list[int] = field(default_factory=list)  # batches of the updates in between
    issued: int = 0
    finished: int = 0
    trained: int = 0
    dropped: int = 0
    filtered: int = 0
    running: dict[int, int] = field(default_factory=dict)  # order -> version at start
    ready: dict[int, int] = field(default_factory=dict)  # order -> version of the oldest token
    taken: list[int] = field(default_factory=list)  # staleness of the groups that the open update holds
    used: list[int] = field(default_factory=list)  # staleness of each trained group

    def start(self) -> bool:
        room = headroom(
            accepted=self.trained + len(self.taken) + len(self.ready),
            running=len(self.running),
            finished=self.finished,
            batch_size=self.batch,
            max_staleness=self.eta,
            made=self.made,
            max_in_flight=self.cap,
        )
        if not room:
            return False
        self.running[self.issued] = self.pushed
        self.issued += 1
        return True

    def finish(self, pick: int, *, keep: bool, newer: bool) -> None:
        order = sorted(self.running)[pick % len(self.running)]
        version = self.running.pop(order)
        if not keep:
            self.filtered += 1
        else:  # a group that waited for its first token until after an update is younger than its start
            self.ready[order] = self.pushed if newer else version

    def take(self, most: int) -> int:
        """Takes a part of at most so many groups, and ends the update where that completes it."""
        plan = plan_part(
            self.version,
            [GroupAge(version, order) for order, version in self.ready.items()],
            Counter(self.running.values()),
            places=self.batch - len(self.taken),
            batch_size=self.batch,
            max_staleness=self.eta,
            on_stale=self.on_stale,  # type: ignore[arg-type]
        )
        for group in plan.drop:
            del self.ready[group.order]
            self.dropped += 1
        for order in [order for order, version in self.running.items() if version in plan.late]:
            del self.running[order]
            self.dropped += 1
        for group in plan.take[:most]:
            self.taken.append(self.version - self.ready.pop(group.order))
        if not plan.take and self.ready:
            assert plan.held_by in self.running.values(), "nothing is taken, and nothing that runs holds it back"
        if len(self.taken) == self.batch:
            self._end()
        return len(plan.take[:most])

    def _end(self) -> None:
        ages = [GroupAge(version, order) for order, version in (self.ready | self.running).items()]
        gone = left_behind(
            self.version,
            ages,
            batch_size=self.batch,
            max_staleness=self.eta,
            on_stale=self.on_stale,  # type: ignore[arg-type]
        )
        for group in gone:
            del (self.ready if group.order in self.ready else self.running)[group.order]
            self.dropped += 1
        self.used += self.taken
        self.trained += self.batch
        self.made.append(self.batch)
        self.version += 1
        self.taken = []
        if self.eta == 0 or self.version - self.pushed > 1:
            self.push()

    def push(self) -> None:
        """The weights of the oldest update that the servers lack arrive."""
        if self.made:
            self.finished += self.made.pop(0)
            self.pushed += 1

    def grow(self) -> None:
        """The batch size is raised between two updates."""
        if not self.taken:
            self.batch += 1


@settings(max_examples=300)
@example(1, 1, "wait", None, [("start", 0), ("finish", 0), ("take", 0), ("grow", 0)])  # raised before the push
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["wait", "drop"]),
    st.sampled_from([None, 1, 2]),
    st.lists(
        st.tuples(st.sampled_from(["start", "finish", "filter", "newer", "take", "push", "grow"]), st.integers(0, 20))
    ),
)
def test_the_bound_holds_for_any_order_of_events_and_any_parts(
    batch: int, eta: int, on_stale: str, cap: int | None, events: list[tuple[str, int]]
) -> None:
    run = _Run(batch, eta, on_stale, cap)
    for kind, pick in events:
        if kind == "start":
            run.start()
        elif kind == "take":
            run.take(1 + pick % run.batch)
        elif kind == "push":
            run.push()
        elif kind == "grow":
            run.grow()
        elif run.running:
            run.finish(pick, keep=kind != "filter", newer=kind == "newer")
    # From here on everything that runs comes in, newest first, and weights as late as may be: no run is stuck.
    before = run.version
    while run.version < before + eta + 3:
        while run.start():
            pass
        if run.take(run.batch):
            continue
        if run.running:
            run.finish(len(run.running) - 1, keep=True, newer=False)
        else:
            run.push()
            assert run.start()
    assert all(0 <= age <= eta for age in [*run.used, *run.taken])
    in_flight = len(run.running) + len(run.ready) + len(run.taken)
    assert run.issued == run.trained + run.dropped + run.filtered + in_flight
    if on_stale == "wait":
        assert run.dropped == 0


@st.composite
def _held_moments(draw: st.DrawFn) -> tuple[int, int, int, list[GroupAge], list[GroupAge]]:
    """(step, batch, eta, ready, running) with as many groups in flight as admission allows, or fewer."""
    step, batch, eta = draw(st.integers(0, 6)), draw(st.integers(1, 6)), draw(st.integers(0, 4))
    groups: list[GroupAge] = []
    for version in range(max(0, step - eta), step + 1):
        room = (version + eta - step + 1) * batch - len(groups)
        groups += _ages(*[version] * draw(st.integers(0, max(0, room))), first=len(groups))
    ready = [group for group in groups if draw(st.booleans())]
    return step, batch, eta, ready, [group for group in groups if group not in ready]


@given(_held_moments(), st.data())
@settings(max_examples=400, deadline=None)
def test_each_end_behind_a_held_group_lets_in_one_more_at_most(
    moment: tuple[int, int, int, list[GroupAge], list[GroupAge]], data: st.DataObject
) -> None:
    """So that a part that lacks k groups need not be planned again before k of those that hold it have ended."""
    step, batch, eta, ready, running = moment
    plan = _plan(step, ready, running, batch=batch, eta=eta)
    if plan.held_by is None:
        return
    for ends in range(1, batch - len(plan.take)):
        holding = [group for group in running if group.oldest_version <= plan.held_by]
        if not holding:
            return
        ended = data.draw(st.sampled_from(holding))
        running.remove(ended)
        if data.draw(st.booleans()):  # else it failed
            version = data.draw(st.integers(ended.oldest_version, step))  # of its first token, which came later
            ready.append(GroupAge(version, ended.order))
        if data.draw(st.booleans()):  # others end beside them
            younger = [group for group in running if group.oldest_version > plan.held_by]
            for group in younger[: data.draw(st.integers(0, len(younger)))]:
                running.remove(group)
                ready.append(group)
        now = _plan(step, ready, running, batch=batch, eta=eta)
        assert len(now.take) <= len(plan.take) + ends < batch
