"""The msgpack codec: what goes in comes out, and nothing else than WireError is raised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from nightshift.wire import codec
from nightshift.wire.errors import WireError

_DTYPES = ("<f4", "<f8", "<i4", "<i8", "|u1", "|i1", "|b1", "<f2", "<u4", "<u8")

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | _texts | st.binary()
)
_plain = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=20,
)
_arrays = st.sampled_from(_DTYPES).flatmap(
    lambda name: stn.arrays(np.dtype(name), stn.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


_both = pytest.mark.parametrize("pack", [codec.pack, codec.pack_known], ids=["pack", "pack_known"])


@_both
@given(value=_plain)
def test_plain_values_come_back(pack: Callable[[Any], bytes], value: Any) -> None:
    assert codec.unpack(pack(value)) == value


@_both
@given(array=_arrays)
def test_arrays_come_back_bit_for_bit(pack: Callable[[Any], bytes], array: np.ndarray) -> None:
    back = codec.unpack(pack({"x": array}))["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@_both
@pytest.mark.parametrize("array", [np.arange(12).reshape(3, 4).T, np.arange(12)[::3], np.arange(3, dtype=">i4")])
def test_strides_and_byte_order_do_not_matter(pack: Callable[[Any], bytes], array: np.ndarray) -> None:
    back = codec.unpack(pack(array))
    assert np.array_equal(back, array)
    assert back.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")


def test_decoded_arrays_are_read_only() -> None:
    back = codec.unpack(codec.pack(np.zeros(3, np.float32)))
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


@_both
@pytest.mark.parametrize(
    ("value", "plain"), [(np.float32(0.5), 0.5), (np.int64(-7), -7), (np.bool_(True), True), ((1, 2), [1, 2])]
)
def test_numpy_scalars_and_tuples_become_plain(pack: Callable[[Any], bytes], value: Any, plain: Any) -> None:
    back = codec.unpack(pack(value))
    assert back == plain
    assert type(back) is type(plain)


def _holds_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        1j,
        2**64,
        "\ud800",
        np.array(["text"]),
        np.array([object()]),
        np.array([1j]),
        np.zeros(2, [("a", "<i4")]),
        np.datetime64("2026-01-01"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        _holds_itself(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_place_on_the_wire_is_refused(value: Any) -> None:
    with pytest.raises(WireError):
        codec.pack({"value": value})
    if not isinstance(value, set):  # its types are known, and a set is none of them
        with pytest.raises(WireError):
            codec.pack_known({"value": value})


def _array(name: Any, shape: Any, raw: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(1, msgpack.packb([name, shape, raw]))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        codec.pack([1, 2]) + b"x",
        codec.pack({"a": "long enough to be cut"})[:-3],
        msgpack.packb("x").replace(b"x", b"\xff"),
        bytes(msgpack.packb(msgpack.ExtType(7, b"abc"))),
        bytes(msgpack.packb(msgpack.ExtType(1, b""))),
        bytes(msgpack.packb(msgpack.ExtType(1, msgpack.packb({"a": 1})))),
        _array("|O8", [1], b"\0" * 8),
        _array(["<f4"], [1], b"\0" * 4),
        _array("<f4", [2], b"\0" * 4),
        _array("<f4", [-1], b"\0" * 4),
        _array("<f4", [1.0], b"\0" * 4),
        _array("<f4", [True], b"\0" * 4),
        _array("<f4", 1, b"\0" * 4),
        _array("<f4", [1], "four"),
        _array("<f4", [2**32, 2**32], b""),
        _array("<f4", [2**62, 0, 2**62], b""),
        _array("<f4", [1] * 80, b"\0" * 4),
        bytes(msgpack.packb({b"k": 1}))[:1] + b"\x90\x01",
        b"\x91" * 100_000,
    ],
    ids=range(21),
)
def test_malformed_messages_are_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        codec.unpack(data)


@pytest.mark.parametrize("data", [None, "text", 3, [1]])
def test_what_is_not_bytes_is_a_wire_error(data: Any) -> None:
    with pytest.raises(WireError, match=type(data).__name__):
        codec.unpack(data)


@given(st.binary(max_size=80))
def test_any_bytes_decode_or_are_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        codec.unpack(data)


@settings(max_examples=300)
@given(_arrays, st.data())
def test_a_damaged_array_decodes_or_is_a_wire_error(array: np.ndarray, data: st.DataObject) -> None:
    message = bytearray(codec.pack({"x": array, "y": [1, "two", None]}))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        codec.unpack(bytes(message))
