"""The error types of all rooms: each names the role, the cause and the fix."""

from __future__ import annotations

from typing import Any


class NightshiftError(Exception):
    """Base of every error that a user is meant to read.

    Args:
        message: one sentence: what is wrong, and with which value.
        role: the role it happened in ("rollout", "reward", "reference", "critic", "trainer", "orchestrator", "job").
        fix: what would be right, or what to do; may be empty.
    """

    #: Exit code of the command line where this error ends it.
    exit_code = 1

    def __init__(self, message: str, *, role: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.role = role
        self.fix = fix

    def __str__(self) -> str:
        head = f"[{self.role}] {self.message}" if self.role else self.message
        return f"{head}. {self.fix}" if self.fix else head

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON: type, role, message and fix."""
        return {"type": type(self).__name__, "role": self.role, "message": self.message, "fix": self.fix}


class BadInputError(NightshiftError):
    """The user's input is wrong; nothing was started."""

    exit_code = 2


class WireError(NightshiftError):
    """A message on the wire is malformed."""


class RoleError(NightshiftError):
    """A role (server, scorer, trainer) failed or answered with something that cannot be used."""


class RoleTimeoutError(RoleError):
    """A role did not answer within its deadline; the message names what was waited for and how long."""


class VersionConflictError(RoleError):
    """A role holds another policy version than the call expects."""
