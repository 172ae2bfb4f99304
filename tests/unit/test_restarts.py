"""When a role that ended is started again."""

from hypothesis import given
from hypothesis import strategies as st

from nightshift.restarts import RestartPolicy


def test_three_deaths_soon_after_the_start_end_it():
    policy = RestartPolicy()
    assert policy.died(5.0) == 1.0
    assert policy.died(0.0) == 2.0
    assert policy.died(19.9) is None


def test_a_role_that_lasted_is_started_again_for_ever():
    policy = RestartPolicy()
    assert [policy.died(60.0) for _ in range(20)] == [1.0] * 20


def test_a_long_life_makes_up_for_early_deaths():
    policy = RestartPolicy()
    assert policy.died(1.0) == 1.0
    assert policy.died(1.0) == 2.0
    assert policy.died(3600.0) == 1.0
    assert policy.died(1.0) == 2.0
    assert policy.died(1.0) is None


@given(st.lists(st.floats(0, 200), max_size=40), st.integers(1, 8))
def test_it_gives_up_exactly_after_so_many_early_deaths_in_a_row(uptimes, limit):
    policy = RestartPolicy(limit=limit)
    row = 0
    for uptime in uptimes:
        early = uptime < policy.early_s
        row = row + 1 if early else 1
        pause = policy.died(uptime)
        assert (pause is None) == (early and row >= limit)
        if pause is None:
            return
        assert policy.first_pause_s <= pause <= policy.longest_pause_s
