"""The state machine of updates: any order of parts, attempts and retries applies each step once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.wire.errors import VersionConflictError
from services.trainer.updates import OrderError, PartKey, UpdateLog


def log_at(version: str = "r/0/0") -> UpdateLog[str]:
    log: UpdateLog[str] = UpdateLog()
    log.reset(version)
    return log


def take(log: UpdateLog[str], step: int, attempt: int, part: int, final: bool, expect: str | None = None) -> bool:
    key = PartKey(step, attempt, part)
    discard = log.admit(key, expect or f"r/0/{step - 1}", f"r/0/{step}")
    (log.applied if final else log.added)(key, f"answer to {key}")
    return discard


def test_parts_in_order_apply_the_step() -> None:
    log = log_at()
    take(log, 1, 0, 0, False)
    assert log.version == "r/0/0"
    take(log, 1, 0, 1, True)
    assert log.version == "r/0/1"


def test_a_repeated_part_has_its_earlier_answer_before_and_after_the_step() -> None:
    log = log_at()
    take(log, 1, 0, 0, False)
    assert log.answer_to(PartKey(1, 0, 0)) is not None
    take(log, 1, 0, 1, True)
    assert log.answer_to(PartKey(1, 0, 0)) is not None
    assert log.answer_to(PartKey(1, 0, 1)) is not None


def test_a_new_attempt_discards_the_parts_of_the_earlier_one() -> None:
    log = log_at()
    take(log, 1, 0, 0, False)
    assert take(log, 1, 1, 0, False) is True
    assert log.answer_to(PartKey(1, 0, 0)) is None
    with pytest.raises(OrderError, match="superseded by attempt 1"):
        log.admit(PartKey(1, 0, 1), "r/0/0", "r/0/1")


def test_another_version_is_refused_with_both_named() -> None:
    with pytest.raises(VersionConflictError, match=r"r/0/0.*r/0/5"):
        log_at().admit(PartKey(6, 0, 0), "r/0/5", "r/0/6")


def test_a_new_attempt_at_an_applied_step_is_refused() -> None:
    log = log_at()
    take(log, 1, 0, 0, True)
    with pytest.raises(VersionConflictError, match=r"step 1, attempt 0"):
        log.admit(PartKey(1, 1, 0), "r/0/0", "r/0/1")


@pytest.mark.parametrize(("attempt", "part"), [(0, 2), (0, 3), (1, 1)])
def test_a_part_out_of_order_is_refused(attempt: int, part: int) -> None:
    log = log_at()
    take(log, 1, 0, 0, False)
    with pytest.raises(OrderError, match="expected part"):
        log.admit(PartKey(1, attempt, part), "r/0/0", "r/0/1")


def test_another_step_is_refused_while_one_is_open() -> None:
    log = log_at()
    take(log, 1, 0, 0, False)
    with pytest.raises(OrderError, match="step 1, attempt 0 is open"):
        log.admit(PartKey(2, 0, 0), "r/0/0", "r/0/2")


def test_after_a_failure_the_next_attempt_discards() -> None:
    log = log_at()
    log.admit(PartKey(1, 0, 0), "r/0/0", "r/0/1")
    log.abandoned()
    assert take(log, 1, 1, 0, True) is True
    assert log.version == "r/0/1"


def test_a_load_forgets_answers_so_that_a_step_can_be_made_again() -> None:
    log = log_at()
    take(log, 1, 0, 0, True)
    log.reset("r/1/0")
    assert log.answer_to(PartKey(1, 0, 0)) is None
    log.admit(PartKey(1, 0, 0), "r/1/0", "r/1/1")
    assert log.version == "r/1/0"


REQUESTS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 2), st.booleans(), st.booleans()), max_size=80
)


@settings(max_examples=300)
@given(REQUESTS)
def test_any_order_of_requests_applies_each_step_once_and_from_whole_attempts(
    requests: list[tuple[int, int, int, bool, bool]],
) -> None:
    """Each request is (step, attempt, part, final, fails); a model of the gradient buffer stands for the ranks."""
    log = log_at()
    held: list[PartKey] = []  # parts whose gradient the ranks hold
    applied: list[int] = []
    answers: dict[PartKey, str] = {}
    for step, attempt, part, final, fails in requests:
        key = PartKey(step, attempt, part)
        before = log.version
        earlier = log.answer_to(key)
        if earlier is not None:
            assert earlier == answers[key]
            continue
        try:
            discard = log.admit(key, f"r/0/{step - 1}", f"r/0/{step}")
        except (OrderError, VersionConflictError):
            assert log.version == before
            continue
        if discard:
            held = []
        held.append(key)
        if fails:
            log.abandoned()
            continue
        answers[key] = f"{key} {final}"
        if final:
            assert held == [PartKey(step, attempt, index) for index in range(part + 1)]
            held = []
            applied.append(step)
            log.applied(key, answers[key])
        else:
            log.added(key, answers[key])
    assert applied == list(range(1, len(applied) + 1))
    assert log.version == f"r/0/{len(applied)}"
