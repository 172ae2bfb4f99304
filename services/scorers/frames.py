"""Length-prefixed msgpack messages over pipes, between the reward pool and its workers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from nightshift.wire import codec
from nightshift.wire.errors import WireError

_HEADER = struct.Struct(">I")
#: Longest message in bytes; a longer one means that something else than a worker wrote into the pipe.
MAX_BYTES = 256 << 20


def encode(message: Any) -> bytes:
    """One frame: the length as 4 bytes, big-endian, then the message.

    Raises:
        WireError: the message cannot be encoded, or is longer than MAX_BYTES.
    """
    body = codec.pack(message)
    if len(body) > MAX_BYTES:
        raise WireError(f"message of {len(body)} bytes, the limit is {MAX_BYTES}")
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Adds what was read and yields the messages that are now complete.

        Raises:
            WireError: the bytes are not frames; the stream cannot be used any more.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            if size > MAX_BYTES:
                raise WireError(f"frame of {size} bytes, the limit is {MAX_BYTES}")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield codec.unpack(body)
