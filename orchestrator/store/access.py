"""Projects, tokens and the audit log in SQL."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Engine, Row, insert, select, update

from nightshift.wire.errors import NightshiftError
from orchestrator.store.schema import audit, projects, tokens

_PREFIX = "ns"


class Scope(StrEnum):
    """What a token may do."""

    READ = "read"
    SUBMIT = "submit"
    CODE = "code"  # bring reward code, or anything else that a job executes
    ADMIN = "admin"  # everything, and projects and tokens


class UnknownTokenError(NightshiftError):
    """There is no such token."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token without its secret. ``project`` None: all projects. Times are unix seconds."""

    id: str
    name: str
    project: str | None
    scopes: frozenset[Scope]
    created: float
    expires: float | None
    revoked: bool


@dataclass(frozen=True, slots=True)
class Project:
    """A project with its quotas; None: no limit."""

    name: str
    max_running: int | None
    max_waiting: int | None
    created: float


class AccessStore:
    """Who may do what, and who did.

    Args:
        engine: as :func:`orchestrator.store.engine.connect` makes it.
        clock: unix seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._write = engine.execution_options(write=True)
        self._clock = clock

    # Tokens -----------------------------------------------------------------------------------------------------------

    def create_token(
        self, name: str, scopes: Iterable[Scope], project: str | None = None, expires: float | None = None
    ) -> tuple[Token, str]:
        """Makes a token; returns it and its text, which is kept nowhere."""
        token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        values = {
            "id": token_id,
            "name": name,
            "project": project,
            "scopes": " ".join(sorted(set(scopes))),
            "hash": _digest(secret),
            "created": self._clock(),
            "expires": expires,
            "revoked": False,
        }
        with self._write.begin() as connection:
            connection.execute(insert(tokens), values)
            row = connection.execute(select(tokens).where(tokens.c.id == token_id)).one()
        return _token(row), f"{_PREFIX}_{token_id}_{secret}"

    def check_token(self, text: str) -> Token | None:
        """The token whose text this is; None for an unknown, expired or revoked one."""
        prefix, _, rest = text.partition("_")
        token_id, _, secret = rest.partition("_")
        if prefix != _PREFIX or not token_id or not secret or len(text) > 200 or not text.isascii():
            return None
        with self._engine.begin() as connection:
            row = connection.execute(select(tokens).where(tokens.c.id == token_id)).first()
        # Compared also where there is no such token, so that both take the same time.
        right = hmac.compare_digest(row.hash if row is not None else "0" * 64, _digest(secret))
        if row is None or not right or row.revoked or (row.expires is not None and row.expires <= self._clock()):
            return None
        return _token(row)

    def is_good(self, token_id: str) -> bool:
        """Whether a token that was checked before is still neither expired nor revoked."""
        with self._engine.begin() as connection:
            row = connection.execute(select(tokens.c.revoked, tokens.c.expires).where(tokens.c.id == token_id)).first()
        return row is not None and not row.revoked and (row.expires is None or row.expires > self._clock())

    def tokens(self) -> list[Token]:
        """All tokens, also revoked ones, oldest first."""
        with self._engine.begin() as connection:
            return [_token(row) for row in connection.execute(select(tokens).order_by(tokens.c.created, tokens.c.id))]

    def revoke_token(self, token_id: str) -> None:
        """Makes a token worthless from now on.

        Raises:
            UnknownTokenError: there is none.
        """
        with self._write.begin() as connection:
            if not connection.execute(update(tokens).where(tokens.c.id == token_id).values(revoked=True)).rowcount:
                raise UnknownTokenError(f"there is no token {token_id!r}")

    # Projects ---------------------------------------------------------------------------------------------------------

    def put_project(self, name: str, max_running: int | None = None, max_waiting: int | None = None) -> Project:
        """Makes a project, or gives it other quotas."""
        values = {"max_running": max_running, "max_waiting": max_waiting}
        with self._write.begin() as connection:
            if not connection.execute(update(projects).where(projects.c.name == name).values(values)).rowcount:
                connection.execute(insert(projects), {"name": name, "created": self._clock(), **values})
            return _project(connection.execute(select(projects).where(projects.c.name == name)).one())

    def projects(self) -> list[Project]:
        """All projects, by name."""
        with self._engine.begin() as connection:
            return [_project(row) for row in connection.execute(select(projects).order_by(projects.c.name))]

    def project(self, name: str) -> Project | None:
        """A project, or None."""
        with self._engine.begin() as connection:
            row = connection.execute(select(projects).where(projects.c.name == name)).first()
        return _project(row) if row is not None else None

    # Audit ------------------------------------------------------------------------------------------------------------

    def note(self, actor: str, action: str, target: str = "", project: str = "", **detail: Any) -> None:
        """Writes down who did what."""
        values = {
            "time": self._clock(),
            "actor": actor,
            "project": project,
            "action": action,
            "target": target,
            "detail": json.dumps(detail),
        }
        with self._write.begin() as connection:
            connection.execute(insert(audit), values)

    def notes(self, *, target: str | None = None, before: int | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Entries of the audit log, the newest first."""
        query = select(audit).order_by(audit.c.number.desc()).limit(limit)
        if target is not None:
            query = query.where(audit.c.target == target)
        if before is not None:
            query = query.where(audit.c.number < before)
        with self._engine.begin() as connection:
            rows = connection.execute(query).mappings().all()
        return [{**row, "detail": json.loads(row["detail"])} for row in rows]


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _token(row: Row[Any]) -> Token:
    scopes = frozenset(Scope(name) for name in row.scopes.split())
    return Token(row.id, row.name, row.project, scopes, row.created, row.expires, bool(row.revoked))


def _project(row: Row[Any]) -> Project:
    return Project(row.name, row.max_running, row.max_waiting, row.created)
