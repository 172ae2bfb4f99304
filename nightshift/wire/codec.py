"""msgpack codec for experience: numpy arrays as (dtype, shape, bytes), nothing that could run code."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from nightshift.wire.errors import WireError

_ARRAY = 1
#: Little-endian dtypes that may cross the wire. Object arrays can never appear here.
_DTYPES = {name: np.dtype(name) for name in ("<f4", "<f8", "<i4", "<i8", "|u1", "|i1", "|b1", "<f2", "<u4", "<u8")}


def pack(value: Any) -> bytes:
    """Encodes plain values (None, bool, int, float, str, bytes, list, dict) and numpy arrays and scalars.

    Raises:
        WireError: the value holds something that has no place on the wire; the message names its type.
    """
    try:
        return bytes(msgpack.packb(value, default=_encode, use_bin_type=True))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"cannot encode for the wire: {error}") from error


def unpack(data: bytes) -> Any:
    """Decodes what :func:`pack` wrote. Arrays are read-only views of ``data``.

    Raises:
        WireError: the bytes are not such a message, or an array in it is inconsistent.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_decode, raw=False, strict_map_key=False)
    except WireError:
        raise
    except Exception as error:  # msgpack raises several unrelated types on bad input
        raise WireError(f"cannot decode message of {len(data)} bytes: {error}") from error


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        name = array.dtype.newbyteorder("<").str
        if name not in _DTYPES:
            raise TypeError(f"array of dtype {value.dtype}")
        return msgpack.ExtType(_ARRAY, msgpack.packb([name, list(value.shape), array.astype(name, copy=False).tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"value of type {type(value).__name__}")


def _decode(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise WireError(f"unknown extension type {code}")
    name, shape, raw = msgpack.unpackb(data, raw=False)
    if name not in _DTYPES:
        raise WireError(f"array of dtype {name!r}")
    dtype = _DTYPES[name]
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise WireError(f"array of shape {shape}")
    if int(np.prod(shape, dtype=np.int64)) * dtype.itemsize != len(raw):
        raise WireError(f"array of shape {shape} and dtype {name} in {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
