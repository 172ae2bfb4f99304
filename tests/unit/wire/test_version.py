"""Policy versions and lineages."""

from __future__ import annotations

import pytest

from nightshift.wire.errors import WireError
from nightshift.wire.version import Lineage, PolicyVersion


def test_round_trip() -> None:
    version = PolicyVersion("demo-1", 2, 16)
    assert PolicyVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["", "default", "run/1", "run/a/1", "run/1/-1", "/0/1", "run/0/1/2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(WireError, match="policy version"):
        PolicyVersion.parse(text)


def test_going_back_makes_the_same_step_another_policy() -> None:
    first = Lineage("r")
    second = first.branch(1, 10)
    assert second.contains(PolicyVersion("r", 0, 10))
    assert not second.contains(PolicyVersion("r", 0, 11))
    assert second.contains(PolicyVersion("r", 1, 11))
    assert second.version(11) != first.version(11)


def test_going_back_twice() -> None:
    third = Lineage("r").branch(1, 10).branch(2, 14)
    assert third.contains(PolicyVersion("r", 1, 14))
    assert not third.contains(PolicyVersion("r", 1, 15))
    assert third.contains(PolicyVersion("r", 0, 7))
    assert not third.contains(PolicyVersion("other", 0, 7))


def test_going_back_behind_an_earlier_branch() -> None:
    third = Lineage("r").branch(1, 10).branch(2, 4)
    assert third.contains(PolicyVersion("r", 0, 4))
    assert not third.contains(PolicyVersion("r", 0, 5))
    assert not third.contains(PolicyVersion("r", 1, 10))
    assert third.contains(PolicyVersion("r", 2, 5))
