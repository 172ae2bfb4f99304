"""msgpack codec for experience: numpy arrays as (dtype, shape, bytes), nothing that could run code."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from nightshift.wire.errors import WireError

_ARRAY = 1
#: Little-endian dtypes that may cross the wire. Object arrays can never appear here.
_DTYPES = {name: np.dtype(name) for name in ("<f4", "<f8", "<i4", "<i8", "|u1", "|i1", "|b1", "<f2", "<u4", "<u8")}

#: Bytes that msgpack sets aside for a message at first. By default it is a quarter of a MiB, which malloc fetches from
#: the system and gives back each time: 15 us for a message of 100 bytes.
_BUFFER = 4096
#: How the message of an array of one dimension begins, by dtype, for arrays as this machine holds them: an array of
#: three (0x93), the name, a list of one (0x91). Nearly all arrays are of this kind, and msgpack itself is slow for
#: something that is called from within.
_BEGINNINGS: dict[np.dtype[Any], bytes] = {
    dtype: b"\x93" + msgpack.packb(name) + b"\x91" for name, dtype in _DTYPES.items() if dtype.isnative
}
#: What follows: the length as a number of 32 bits (0xce), and that of the bytes (0xc6).
_LENGTHS = struct.Struct(">BIBI")
_LONGEST = 2**32 - 1


def pack(value: Any) -> bytes:
    """Encodes plain values (None, bool, int, float, str, bytes, list, tuple, dict) and numpy arrays and scalars.

    A tuple comes back as a list, a numpy scalar as a plain number.

    Raises:
        WireError: the value holds something that has no place on the wire (the message names its type), or is nested
            too deeply, or holds itself.
    """
    try:
        return bytes(msgpack.packb(value, default=_encode, use_bin_type=True, buf_size=_BUFFER))
    except Exception as error:  # msgpack raises several unrelated types on what it cannot write
        raise WireError(f"cannot encode for the wire: {error}") from error


def pack_known(value: Any) -> bytes:
    """As :func:`pack`, in half the time, of a value whose types the caller knows.

    Sets, dates and the like, which :func:`pack` refuses, have some form here.

    Raises:
        WireError: as :func:`pack`.
    """
    try:
        return _QUICK.encode(value)
    except Exception as error:  # of the types of msgspec and of what it calls
        raise WireError(f"cannot encode for the wire: {error}") from error


def unpack(data: bytes) -> Any:
    """Decodes what :func:`pack` wrote. Arrays are read-only.

    Raises:
        WireError: the bytes are not such a message, or an array in it is inconsistent.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise WireError(f"cannot decode a message that is {type(data).__name__}, not bytes")
    try:
        return msgpack.unpackb(data, ext_hook=_decode, raw=False, strict_map_key=False)
    except WireError:
        raise
    except Exception as error:  # msgpack raises several unrelated types on bad input
        raise WireError(f"cannot decode message of {len(data)} bytes: {error}") from error


def _encode(value: Any) -> Any:
    """What msgpack writes for a value that it does not know.

    Raises:
        TypeError: it has no place on the wire.
    """
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _message(value))
    return _number(value)


def _encode_quick(value: Any) -> Any:
    """As :func:`_encode`, for msgspec."""
    return msgspec.msgpack.Ext(_ARRAY, _message(value)) if isinstance(value, np.ndarray) else _number(value)


_QUICK = msgspec.msgpack.Encoder(enc_hook=_encode_quick)


def _message(value: NDArray[Any]) -> bytes:
    if type(value) is np.ndarray and value.ndim == 1 and (beginning := _BEGINNINGS.get(value.dtype)) is not None:
        data = value.tobytes()
        if len(data) <= _LONGEST:
            return beginning + _LENGTHS.pack(0xCE, len(value), 0xC6, len(data)) + data
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("masked array: its mask would be lost")
    name = value.dtype.newbyteorder("<").str
    if name not in _DTYPES:
        raise TypeError(f"array of dtype {value.dtype}")
    raw = np.ascontiguousarray(value).astype(name, copy=False).tobytes()
    return bytes(msgpack.packb([name, list(value.shape), raw]))


def _number(value: Any) -> Any:
    if isinstance(value, np.generic) and value.dtype.newbyteorder("<").str in _DTYPES:
        return value.item()
    raise TypeError(f"value of type {type(value).__name__}")


def _decode(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise WireError(f"unknown extension type {code}")
    name, shape, raw = msgpack.unpackb(data, raw=False)
    if not isinstance(name, str) or name not in _DTYPES:
        raise WireError(f"array of dtype {name!r}")
    dtype = _DTYPES[name]
    if not isinstance(raw, bytes) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"array of shape {shape!r} in {type(raw).__name__}")
    # Python's integers, since a product that wraps around would match a short array.
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise WireError(f"array of shape {shape} and dtype {name} in {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
