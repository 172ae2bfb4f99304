"""Experience of finished groups on disk, until a checkpoint has made it part of the weights."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from nightshift.wire.errors import WireError
from nightshift.wire.experience import Sample, pack_samples, unpack_samples

#: Before each group: its number, the bytes that follow, and a CRC-32 of both. A machine that went down may have written
#: some pages of a file and not others, and zeros are log-probs like any.
_HEAD = struct.Struct("<QQI")
#: A segment takes no further group beyond either: it lies on disk for as long as one of its groups is kept.
_MOST_GROUPS, _MOST_BYTES = 64, 8 << 20
_SUFFIX = ".spool"


class Spool:
    """Groups one behind the other in files of some dozens of groups each, a segment.

    To make and to remove a file for each group was measured at a fifth of the orchestrator's time. A segment is removed
    with the last group that is kept in it; one that a process began is never written to by another. What a killed
    process left unfinished at the end of its segment is as good as none, and what it had removed may come back: the
    ledger knows which groups are over.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._places: dict[int, tuple[int, int, int, int]] = {}  # group -> segment, first byte, bytes, their CRC
        self._kept: dict[int, int] = {}  # segment -> groups that are kept in it
        self._segment = -1  # the one that is written
        self._file = -1
        self._groups = self._bytes = 0  # in it, removed ones included
        for path in sorted(folder.glob(f"*{_SUFFIX}")):
            self._segment = int(path.stem)
            self._take_up(path)

    def put(self, index: int, samples: list[Sample]) -> None:
        """Keeps a finished group, in place of what was kept under its number."""
        data = pack_samples(samples)
        if self._file < 0 or self._groups >= _MOST_GROUPS or self._bytes >= _MOST_BYTES:
            self._begin()
        at = self._bytes + _HEAD.size
        check = _check(index, data)
        self._write(_HEAD.pack(index, len(data), check) + data)
        self._groups += 1
        self._note(index, (self._segment, at, len(data), check))

    def get(self, index: int) -> list[Sample] | None:
        """The group's samples; None where they are not there or not whole."""
        if index not in self._places:
            return None
        segment, at, size, check = self._places[index]
        try:
            with self._path(segment).open("rb") as file:
                file.seek(at)
                data = file.read(size)
            return unpack_samples(data) if _check(index, data) == check else None
        except (FileNotFoundError, WireError):
            return None

    def remove(self, indices: Iterable[int]) -> None:
        """Forgets groups whose step is committed."""
        for index in indices:
            if index in self._places:
                self._let_go(self._places.pop(index)[0])

    def indices(self) -> list[int]:
        """Groups that are kept."""
        return sorted(self._places)

    def close(self) -> None:
        """Ends the segment that is written; what is kept stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._drop_empty(self._segment)

    def _take_up(self, path: Path) -> None:
        """Finds the groups of a segment that another process wrote."""
        segment, at, size = int(path.stem), 0, path.stat().st_size
        with path.open("rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                index, length, check = _HEAD.unpack(head)
                at += _HEAD.size
                if at + length > size:
                    break
                self._note(index, (segment, at, length, check))
                at += length
                file.seek(at)
        self._drop_empty(segment)

    def _begin(self) -> None:
        self.close()
        self._segment += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self._path(self._segment), flags, 0o644)
        self._groups = self._bytes = 0

    def _write(self, data: bytes) -> None:
        """Appends to the segment.

        Raises:
            OSError: the disk is full, for instance. The next group begins another segment.
        """
        self._bytes += len(data)
        try:
            while data:  # a regular file takes all at once; only a full disk or a signal leaves a rest
                data = data[os.write(self._file, data) :]
        except OSError:
            self._bytes = _MOST_BYTES
            raise

    def _note(self, index: int, place: tuple[int, int, int, int]) -> None:
        before = self._places.get(index)
        self._places[index] = place
        self._kept[place[0]] = self._kept.get(place[0], 0) + 1
        if before is not None:
            self._let_go(before[0])

    def _let_go(self, segment: int) -> None:
        self._kept[segment] -= 1
        if segment != self._segment or self._file < 0:
            self._drop_empty(segment)
        elif not self._kept[segment]:  # the one that is written: the next group begins another
            self.close()

    def _drop_empty(self, segment: int) -> None:
        if not self._kept.get(segment):
            self._kept.pop(segment, None)
            self._path(segment).unlink(missing_ok=True)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}{_SUFFIX}"


def _check(index: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(index.to_bytes(8, "little")))
