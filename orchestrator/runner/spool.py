"""Experience of finished groups on disk, until a checkpoint has made it part of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nightshift.wire.errors import WireError
from nightshift.wire.experience import Sample, pack_samples, unpack_samples


class Spool:
    """One file per group below a folder; complete by rename."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, index: int, samples: list[Sample]) -> None:
        """Keeps a finished group."""
        path = self._path(index)
        part = path.with_suffix(".tmp")
        part.write_bytes(pack_samples(samples))
        part.replace(path)

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
