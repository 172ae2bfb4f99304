"""The resumable cursor."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.data import Cursor
from nightshift.data.cursor import epoch_order
from nightshift.wire.errors import BadInputError


def _take(cursor: Cursor, count: int) -> list[tuple[int, int]]:
    return [cursor.next() for _ in range(count)]


def test_o42_two_epochs_hold_every_row_once_in_different_orders() -> None:
    rows = _take(Cursor(12, seed=7), 24)
    first, second = [i for e, i in rows if e == 0], [i for e, i in rows if e == 1]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert first != list(range(12))


def test_the_seed_fixes_the_order() -> None:
    assert _take(Cursor(12, seed=7), 30) == _take(Cursor(12, seed=7), 30)
    assert _take(Cursor(12, seed=7), 12) != _take(Cursor(12, seed=8), 12)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert epoch_order(8, seed=0, epoch=1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]


def test_without_shuffle_rows_keep_their_order() -> None:
    assert _take(Cursor(3, shuffle=False), 7) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@given(st.integers(1, 9), st.integers(0, 5), st.booleans(), st.integers(0, 30), st.integers(0, 30))
def test_o42_a_resumed_cursor_goes_on_exactly(size: int, seed: int, shuffle: bool, before: int, after: int) -> None:
    one = Cursor(size, seed, shuffle)
    _take(one, before)
    state = json.loads(json.dumps(one.state()))
    other = Cursor(size, seed, shuffle)
    _take(other, after)
    other.restore(state)
    assert other.epoch == one.epoch == before // size
    assert _take(other, 2 * size + 1) == _take(one, 2 * size + 1)


@pytest.mark.parametrize(
    "change",
    [{"size": 5}, {"seed": 2}, {"shuffle": False}, {"epoch": -1}, {"offset": 4}, {"offset": "1"}, {"epoch": None}],
    ids=str,
)
def test_a_state_of_other_data_or_a_malformed_one_is_refused(change: dict[str, object]) -> None:
    cursor = Cursor(4, seed=1)
    with pytest.raises(BadInputError, match="cursor"):
        cursor.restore({**cursor.state(), **change})
    with pytest.raises(BadInputError):
        cursor.restore({})


def test_no_rows_are_refused() -> None:
    with pytest.raises(BadInputError, match="no prompts"):
        Cursor(0)


def test_every_place_is_equally_likely() -> None:
    places = np.array([epoch_order(4, seed=3, epoch=epoch) for epoch in range(4000)])
    for place in range(4):
        counts = np.bincount(places[:, place], minlength=4)
        assert (np.abs(counts - 1000) < 150).all()


def _epochs(cursor: Cursor, count: int) -> list[list[int]]:
    epochs: list[list[int]] = [[] for _ in range(count)]
    while True:
        epoch, row = cursor.next()
        if epoch == count:
            return epochs
        epochs[epoch].append(row)


def test_weights_say_how_often_an_epoch_holds_the_rows_of_a_file() -> None:
    parts = [(4, 2.0), (6, 0.5), (3, 0.0)]
    for shuffle in (True, False):
        epochs = _epochs(Cursor(13, 3, shuffle, parts=parts), 2)
        for rows in epochs:
            assert sorted(row for row in rows if row < 4) == [0, 0, 1, 1, 2, 2, 3, 3]
            assert len([row for row in rows if 4 <= row < 10]) == 3
            assert max(rows) < 10
        # Of the half-weighted file every row has its turn in two epochs.
        assert sorted(row for rows in epochs for row in rows if row >= 4) == [4, 5, 6, 7, 8, 9]


def test_o42_a_weighted_and_sorted_cursor_goes_on_exactly() -> None:
    def make() -> Cursor:
        keys = np.arange(10, dtype=np.float64)[::-1].copy()
        return Cursor(10, 5, parts=[(4, 1.5), (6, 1.0)], keys=lambda epoch: keys if epoch else np.zeros(10))

    one = make()
    for _ in range(17):
        one.next()
    other = make()
    other.restore(one.state())
    assert [one.next() for _ in range(30)] == [other.next() for _ in range(30)]
    with pytest.raises(BadInputError, match="weights"):
        Cursor(10, 5).restore(one.state())


def test_a_curriculum_sorts_each_epoch_and_keeps_the_shuffle_among_equals() -> None:
    keys = np.array([0, 0, 0, 1, 1, 1], np.float64)
    plain = _epochs(Cursor(6, 1), 1)[0]
    rows = _epochs(Cursor(6, 1, keys=lambda _: keys), 1)[0]
    assert sorted(rows[:3]) == [0, 1, 2]
    assert rows[:3] == [row for row in plain if row < 3]


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(BadInputError, match="weights"):
        Cursor(4, parts=[(4, 0.1)])
