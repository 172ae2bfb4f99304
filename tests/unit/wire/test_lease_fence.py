"""Fencing tokens of leases: their order, their text, and what a server admits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.lease_fence import Fence, LeaseFence

NUMBERS = st.integers(0, 10**18 - 1)
LEASES = st.builds(LeaseFence, NUMBERS, NUMBERS)
FEW = st.lists(st.builds(LeaseFence, st.integers(0, 3), st.integers(0, 5)), max_size=60)


@given(LEASES)
def test_a_lease_survives_its_text(lease: LeaseFence) -> None:
    assert LeaseFence.parse(str(lease)) == lease


@given(FEW)
def test_a_server_never_goes_back_to_an_older_lease(asked: list[LeaseFence]) -> None:
    fence = Fence()
    admitted = [lease for lease in asked if fence.admits(lease)]
    assert admitted == sorted(admitted)
    assert fence.newest == (max(asked) if asked else None)
    # Exactly what is older than something before it is refused.
    before = [max(asked[:at], default=asked[at]) for at in range(len(asked))]
    assert admitted == [lease for lease, newest in zip(asked, before, strict=True) if lease >= newest]


@given(FEW.filter(bool))
def test_a_refusal_names_both_leases_and_moves_nothing(asked: list[LeaseFence]) -> None:
    fence = Fence()
    for lease in asked:
        fence.admits(lease)
    older = LeaseFence(0, 0)
    if older < max(asked):
        assert not fence.admits(older)
        assert str(older) in fence.refusal(older)
        assert str(max(asked)) in fence.refusal(older)
    assert fence.newest == max(asked)


@pytest.mark.parametrize(
    "text", ["", "1", "1.", ".1", "1.2.3", "+1.2", " 1.2", "1.2\n", "1,2", "1.1234567890123456789"]
)
def test_what_is_no_lease(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected EPOCH\.NUMBER"):
        LeaseFence.parse(text)
