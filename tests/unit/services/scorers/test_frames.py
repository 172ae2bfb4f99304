import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.errors import WireError
from services.scorers.frames import FrameReader, encode

messages = st.lists(
    st.dictionaries(st.text(), st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.text(), st.binary()))
)


@given(messages, st.integers(1, 50))
def test_messages_survive_any_cut_of_the_stream(sent, size):
    stream = b"".join(encode(message) for message in sent)
    reader = FrameReader()
    received = [message for at in range(0, len(stream), size) for message in reader.feed(stream[at : at + size])]
    assert received == sent


def test_bytes_that_are_no_frames_are_refused():
    with pytest.raises(WireError, match="frame of"):
        list(FrameReader().feed(b"Traceback (most recent call last)"))
    with pytest.raises(WireError, match="cannot decode"):
        list(FrameReader().feed(b"\0\0\0\1\xc1"))
