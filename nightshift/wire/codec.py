"""msgpack codec for experience: numpy arrays as (dtype, shape, bytes), nothing that could run code."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from nightshift.wire.errors import WireError

_ARRAY = 1
#: Little-endian dtypes that may cross the wire. Object arrays can never appear here.
_DTYPES = {name: np.dtype(name) for name in ("<f4", "<f8", "<i4", "<i8", "|u1", "|i1", "|b1", "<f2", "<u4", "<u8")}

#: Bytes that msgpack sets aside for a message at first. By default it is a quarter of a MiB, twice where an array is
#: packed within, which malloc fetches from the system and gives back each time: 15 us for a message of 100 bytes.
_BUFFER, _HEAD = 4096, 64
#: Their names by dtype, for arrays as this machine holds them.
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if dtype.isnative}


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
    if type(value) is np.ndarray and (native := _NAMES.get(value.dtype)) is not None:
        data = msgpack.packb([native, value.shape, value.tobytes()], buf_size=value.nbytes + _HEAD)
        return msgpack.ExtType(_ARRAY, data)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("masked array: its mask would be lost")
    if isinstance(value, np.ndarray):
        name = value.dtype.newbyteorder("<").str
        if name not in _DTYPES:
            raise TypeError(f"array of dtype {value.dtype}")
        raw = np.ascontiguousarray(value).astype(name, copy=False).tobytes()
        return msgpack.ExtType(_ARRAY, msgpack.packb([name, list(value.shape), raw]))
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
