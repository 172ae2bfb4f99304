"""The two files by which a job learns of the rollout servers that it was lent, and says which it has let go of.

``leases.json`` is written by the service and holds the servers' tokens, so that its owner alone may read it;
``leases.released.json`` is written by the runner. Both by rename.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nightshift.wire.lease_fence import LeaseFence

LEASED, RELEASED = "leases.json", "leases.released.json"


@dataclass(frozen=True, slots=True)
class LeasedServer:
    """A rollout server that a job was lent.

    Attributes:
        lease: fencing token; another lease of the same server has a greater one.
        token: bearer token of the server.
        break_off: unix seconds at which requests there are broken off, since it was asked back; None: it was not.
        epoch: when its fleet was made, in unix milliseconds: numbers of leases begin anew with a fleet.
    """

    name: str
    url: str
    lease: int
    token: str = ""
    break_off: float | None = None
    epoch: int = 0

    @property
    def fence(self) -> LeaseFence:
        """The lease's fencing token, as its server is told."""
        return LeaseFence(self.epoch, self.lease)


@dataclass(frozen=True, slots=True)
class Released:
    """What a runner says of its leases.

    Attributes:
        wants: whether it has a use for servers.
        leases: those that it does not use and will never use again.
    """

    wants: bool = False
    leases: frozenset[int] = frozenset()


def write_leases(run_dir: Path, servers: Iterable[LeasedServer]) -> None:
    """Tells a job what it was lent.

    Raises:
        OSError: the file cannot be written.
    """
    _write(run_dir / LEASED, {"servers": [asdict(server) for server in servers]})


def read_leases(run_dir: Path) -> list[LeasedServer]:
    """What a job was lent; nothing where there is no such file.

    Raises:
        ValueError: the file is none.
        TypeError: one of its entries is none.
    """
    try:
        found = json.loads((run_dir / LEASED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [LeasedServer(**entry) for entry in found["servers"]]


def write_released(run_dir: Path, released: Released) -> None:
    """Tells the service what a job has let go of.

    Raises:
        OSError: the file cannot be written.
    """
    _write(run_dir / RELEASED, {"wants": released.wants, "leases": sorted(released.leases)})


def read_released(run_dir: Path) -> Released:
    """What a job has let go of; where it says nothing or something else, it wants nothing."""
    try:
        found = json.loads((run_dir / RELEASED).read_text(encoding="utf-8"))
        return Released(found["wants"] is True, frozenset(int(lease) for lease in found["leases"]))
    except (OSError, ValueError, TypeError, KeyError):
        return Released()


def forget_leases(run_dir: Path) -> None:
    """Removes both files: they are those of an earlier process."""
    for name in (LEASED, RELEASED):
        (run_dir / name).unlink(missing_ok=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
