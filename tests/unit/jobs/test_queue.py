"""Which waiting jobs start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.jobs.queue import Waiting, choose


def jobs(*items: tuple[str, str, int]) -> list[Waiting]:
    return [Waiting(name, project, priority, order) for order, (name, project, priority) in enumerate(items)]


def test_by_priority_then_by_submission() -> None:
    waiting = jobs(("a", "p", 0), ("b", "p", 5), ("c", "p", 0))
    assert choose(waiting, [], at_once=3, quotas={}) == ["b", "a", "c"]


def test_only_as_many_as_may_run() -> None:
    waiting = jobs(("a", "p", 0), ("b", "p", 0))
    assert choose(waiting, ["q"], at_once=2, quotas={}) == ["a"]
    assert choose(waiting, ["q", "q"], at_once=2, quotas={}) == []


def test_a_project_at_its_quota_holds_up_nobody() -> None:
    waiting = jobs(("a", "p", 9), ("b", "q", 0))
    assert choose(waiting, ["p"], at_once=3, quotas={"p": 1}) == ["b"]
    assert choose(jobs(("a", "p", 0), ("b", "p", 0)), [], at_once=3, quotas={"p": 1}) == ["a"]
    assert choose(jobs(("a", "p", 0)), [], at_once=3, quotas={"p": 0}) == []


def test_equal_priority_goes_to_the_project_that_runs_least() -> None:
    waiting = jobs(("a", "p", 0), ("b", "p", 0), ("c", "q", 0))
    assert choose(waiting, ["p"], at_once=4, quotas={}) == ["c", "a", "b"]


@given(
    st.lists(st.tuples(st.sampled_from("pqr"), st.integers(-2, 2)), max_size=12),
    st.lists(st.sampled_from("pqr"), max_size=4),
    st.integers(0, 6),
    st.dictionaries(st.sampled_from("pqr"), st.one_of(st.none(), st.integers(0, 3))),
)
def test_limits_hold_and_no_place_stays_free(items, running, at_once, quotas) -> None:
    waiting = [Waiting(str(order), project, priority, order) for order, (project, priority) in enumerate(items)]
    chosen = choose(waiting, running, at_once=at_once, quotas=quotas)
    assert len(set(chosen)) == len(chosen)
    assert len(chosen) <= max(0, at_once - len(running))
    projects = {job.job_id: job.project for job in waiting}
    count = {p: running.count(p) + sum(projects[name] == p for name in chosen) for p in "pqr"}
    started = {projects[name] for name in chosen}
    assert all(quotas.get(p) is None or count[p] <= quotas[p] for p in started)
    if len(running) + len(chosen) < at_once:
        left = {job.project for job in waiting if job.job_id not in chosen}
        assert all(quotas.get(p) is not None and count[p] >= quotas[p] for p in left)
