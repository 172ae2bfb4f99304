"""The growing end of a file."""

from __future__ import annotations

from pathlib import Path

from nightshift.wire.events import Event, parse_line


class Tail:
    """Reads the events that were added since it was made, or since the last reading; never waits."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = 0 if from_start or not path.exists() else path.stat().st_size

    def read(self) -> list[Event]:
        """New complete events, in order."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data.rfind(b"\n") + 1
        if not complete:
            return []
        where = f"{self._path.name}: a line after byte {self._offset}"
        self._offset += complete
        return [parse_line(line, where) for line in data[:complete].split(b"\n") if line.strip()]


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file that hold anything; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines[-count:] if count else []
