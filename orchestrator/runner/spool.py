"""Experience of finished groups on disk, until a checkpoint has made it part of the weights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from nightshift.wire.errors import WireError
from nightshift.wire.experience import Sample, pack_samples, unpack_samples


class Spool:
    """One file per group below a folder. One that a killed process left unfinished is as good as none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefix = f"{folder}/"
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, index: int, samples: list[Sample]) -> None:
        """Keeps a finished group."""
        data = pack_samples(samples)
        # Four samples are written faster than a file object is made.
        file = os.open(f"{self._prefix}{index}.msgpack", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            while data:  # a regular file takes all at once; only a full disk or a signal leaves a rest
                data = data[os.write(file, data) :]
        finally:
            os.close(file)

    def get(self, index: int) -> list[Sample] | None:
        """The group's samples; None where they are not there or not whole."""
        try:
            return unpack_samples(self._path(index).read_bytes())
        except (FileNotFoundError, WireError):
            return None

    def remove(self, indices: Iterable[int]) -> None:
        """Forgets groups whose step is committed."""
        for index in indices:
            self._path(index).unlink(missing_ok=True)

    def indices(self) -> list[int]:
        """Groups that are kept."""
        return sorted(int(path.stem) for path in self._folder.glob("*.msgpack"))

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.msgpack"
