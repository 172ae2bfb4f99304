"""All vLLM servers of a run on this machine, as one role."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from nightshift.wire.errors import NightshiftError
from services.agent.background import Background
from services.agent.rollout_role import Report, RolloutRole, Server

#: Longest time for the end of a server.
_STOP_S = 25.0


class RolloutServers:
    """Servers that are started together, and live and die each for itself.

    Args:
        servers: that have not been started.
        wake: is called from another thread when :meth:`tick` should be.
        stall_timeout_s: see :class:`RolloutRole`.
        asked: see :class:`RolloutRole`.
    """

    NAME = RolloutRole.NAME

    def __init__(
        self,
        servers: Sequence[Server],
        report: Report,
        wake: Callable[[], None],
        *,
        stall_timeout_s: float,
        asked: Callable[[dict[str, Any]], str | None],
    ) -> None:
        self._report = report
        self._roles = [
            RolloutRole(server, report, wake, stall_timeout_s=stall_timeout_s, asked=asked) for server in servers
        ]

    @property
    def ready(self) -> bool:
        """Whether all of them may be sent requests."""
        return all(role.ready for role in self._roles)

    @property
    def failed(self) -> NightshiftError | None:
        """The first failure of a start that :meth:`tick` has not dealt with yet."""
        return next((role.failed for role in self._roles if role.failed), None)

    def begin(self, now: float) -> None:
        """Starts all of them and returns at once."""
        for role in self._roles:
            role.begin(now)

    def tick(self, now: float) -> bool:
        """Looks after the servers; True where an address has changed.

        One that ends too often is given up, as long as another one is left.

        Raises:
            NightshiftError: a first start failed, or the last server ended too often.
        """
        changed = False
        for role in list(self._roles):
            try:
                changed |= role.tick(now)
            except NightshiftError as error:
                if len(self._roles) == 1 or not role.was_ready:
                    raise
                self._roles.remove(role)
                changed = True
                name = role.server.entry()["name"]
                detail = f"{name} is given up, the run goes on without it: {error.message}"
                self._report(self.NAME, "retired", detail=detail, fix=error.fix)
        return changed

    def entries(self) -> list[dict[str, Any]]:
        """The servers as ``services.json`` lists them."""
        return [role.server.entry() for role in self._roles]

    def stop(self) -> None:
        """Ends all of them at once."""
        ends = [Background("the vLLM server", role.stop) for role in self._roles]
        for end in ends:
            end.start()
        deadline = time.monotonic() + _STOP_S
        for end in ends:
            end.wait(deadline)
