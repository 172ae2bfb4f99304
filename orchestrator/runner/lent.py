"""Rollout servers that a run was lent: taken when a lease begins, drained when it is asked back, and let go of."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nightshift.config.rollout import FleetUse
from nightshift.wire.lease_file import LeasedServer, Released, read_leases, write_released
from orchestrator.runner.engine import EngineAddress

_PREFIX = "lease-"


class Lent:
    """The leases of a run, as the service writes them, and what the run has let go of.

    A lease that was asked back is never taken up, so that once it is let go of it stays so.

    Args:
        run_dir: the run's folder.
        use: what the job asks of its fleet.
        clock: unix seconds.
    """

    def __init__(self, run_dir: Path, use: FleetUse, clock: Callable[[], float] = time.time) -> None:
        self._run_dir = run_dir
        self._use = use
        self._empty_since: float | None = None
        self._clock = clock
        self._listed: dict[int, LeasedServer] = {}
        self._held: set[int] = set()
        self._said: Released | None = None
        self._wants = False

    @property
    def empty(self) -> bool:
        """Whether the run has no server that it may give work to: others have them, and nothing is wrong."""
        return all(server.break_off is not None for server in self._listed.values())

    @property
    def overdue(self) -> str:
        """Why it is in vain to wait for a server any longer; "": it is not."""
        waited = self._clock() - self._empty_since if self._empty_since is not None else 0.0
        if waited <= self._use.max_wait_s:
            return ""
        return f"fleet {self._use.name!r} lent the job no server for {waited:.0f} s (rollout.fleet.max_wait_s)"

    def begin(self) -> None:
        """Asks for servers."""
        self._wants = True
        self._empty_since = self._clock()
        self._say()

    def end(self) -> None:
        """Lets go of everything; no server is used any more."""
        self._wants = False
        self._held.clear()
        self._say()

    def addresses(self, weight_backend: str, init_info: dict[str, Any]) -> list[EngineAddress]:
        """Servers that the run may use now.

        Args:
            weight_backend: vLLM's weight-transfer engine, of all servers.
            init_info: where weights come from.

        Raises:
            ValueError: the file of leases is none.
            TypeError: one of its entries is none.
        """
        self._listed = {server.lease: server for server in read_leases(self._run_dir)}
        usable = [server for server in self._listed.values() if server.break_off is None]
        self._held |= {server.lease for server in usable}
        self._empty_since = None if usable else self._empty_since or self._clock()
        self._say()
        return [
            EngineAddress(
                name=server.name,
                url=server.url,
                token=server.token,
                incarnation=f"{_PREFIX}{server.lease}",
                weight_backend=weight_backend,
                init_info=init_info,
                lease=str(server.fence),
            )
            for server in usable
        ]

    def patience(self, address: EngineAddress) -> float:
        """Seconds for which requests may still end on a server that has left; 0 where its lease is over."""
        server = self._listed.get(_number(address))
        until = server.break_off if server is not None else None
        return max(0.0, until - self._clock()) if until is not None else 0.0

    def left(self, address: EngineAddress) -> None:
        """A server is not used any more."""
        self._held.discard(_number(address))
        self._say()

    def _say(self) -> None:
        """Tells the service where there is something new; a disk that is full now is tried again at the next look."""
        asked = {number for number, server in self._listed.items() if server.break_off is not None or not self._wants}
        said = Released(self._wants, frozenset(asked - self._held))
        if said == self._said:
            return
        try:
            write_released(self._run_dir, said)
            self._said = said
        except OSError:
            self._said = None


def _number(address: EngineAddress) -> int:
    return int(address.incarnation.removeprefix(_PREFIX))
