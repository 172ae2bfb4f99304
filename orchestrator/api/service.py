"""What all routes share: stores, settings, and who is asking."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.api.config import ServiceConfig
from orchestrator.api.ledgers import Ledgers
from orchestrator.api.problems import ProblemError
from orchestrator.jobs.lending import Lender
from orchestrator.jobs.pulse import Pulse
from orchestrator.jobs.scheduler import Scheduler, SchedulerConfig
from orchestrator.jobs.submission import Policy
from orchestrator.jobs.uploads import Uploads
from orchestrator.store.access import AccessStore, Scope
from orchestrator.store.engine import connect
from orchestrator.store.fleets import FleetStore
from orchestrator.store.jobs import JobRecord, JobStore

DEFAULT_PROJECT = "default"
_bearer = HTTPBearer(auto_error=False, description="A token of this service: `ns_…`.")


class Service:
    """The job service in one process.

    Args:
        config: its settings.
        clock: unix seconds.
    """

    def __init__(self, config: ServiceConfig, clock: Callable[[], float] = time.time) -> None:
        config.runs_dir.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.clock = clock
        self.engine: Engine = connect(config.url)
        self.jobs = JobStore(self.engine, clock)
        self.access = AccessStore(self.engine, clock)
        self.uploads = Uploads(config.data_dir / "uploads", config.max_upload, config.max_project_uploads)
        self.uploads.sweep()
        self.fleets = FleetStore(self.engine, clock)
        self.pulse = Pulse()
        self.policy = Policy(config.allowed, config.weight_store)
        owner = f"{config.owner_prefix}{uuid.uuid4().hex}"
        self.scheduler = Scheduler(
            self.jobs,
            self.access,
            SchedulerConfig(
                owner=owner,
                replaces=config.owner_prefix,
                command=config.command,
                at_once=config.at_once,
                tick_s=config.tick_s,
                lease_s=config.lease_s,
                ledger_url=config.database_url,
            ),
            lender=Lender(
                self.jobs,
                self.fleets,
                self.pulse,
                owner=owner,
                replaces=config.owner_prefix,
                lease_s=config.lease_s,
                clock=clock,
            ),
        )
        self.ledgers = Ledgers()
        self.streams = 0
        self.grpc_port = 0
        self.settings_lock = threading.Lock()
        self.plans = asyncio.Semaphore(config.max_plans)
        if self.access.project(DEFAULT_PROJECT) is None:
            self.access.put_project(DEFAULT_PROJECT)

    def first_token(self) -> str | None:
        """Makes an administrator's token where there is none at all; returns its text."""
        if self.access.tokens():
            return None
        _, text = self.access.create_token("admin", [Scope.ADMIN])
        return text

    def close(self) -> None:
        """Ends the scheduler; jobs go on."""
        self.scheduler.stop()
        self.ledgers.close()
        self.engine.dispose()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is asking.

    Attributes:
        project: the one that the caller belongs to; None: all.
        token_id: of the token; empty where none is needed.
    """

    name: str
    project: str | None
    scopes: frozenset[Scope]
    token_id: str = ""

    def may(self, scope: Scope) -> bool:
        """Whether the caller has a scope, itself or by another one that holds it."""
        if Scope.ADMIN in self.scopes or scope in self.scopes:
            return True
        return scope is Scope.READ and bool(self.scopes & {Scope.SUBMIT, Scope.CODE})

    def project_for(self, asked: str | None) -> str:
        """The project of a new thing.

        Raises:
            ProblemError: the caller belongs to another one.
        """
        if asked is not None and self.project is not None and asked != self.project:
            raise ProblemError(404, f"there is no project {asked!r}")
        return self.project or asked or DEFAULT_PROJECT


def service_of(request: Request) -> Service:
    """The service of an application."""
    service: Service = request.app.state.service
    return service


def caller_of(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
) -> Caller:
    """Who is asking.

    Raises:
        ProblemError: 401 for a token that is missing, unknown, expired or revoked.
    """
    return caller_from(service_of(request), credentials.credentials if credentials is not None else None)


def caller_from(service: Service, text: str | None) -> Caller:
    """Who a token's text stands for; None: there was none.

    Raises:
        ProblemError: 401 for a token that is missing, unknown, expired or revoked.
    """
    if text is None:
        if not service.config.require_token:
            return Caller("local", None, frozenset({Scope.ADMIN}))
        raise ProblemError(
            401, "a bearer token is needed: Authorization: Bearer ns_…", headers={"WWW-Authenticate": "Bearer"}
        )
    token = service.access.check_token(text)
    if token is None:
        raise ProblemError(
            401,
            "the token is unknown, expired or revoked",
            headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
        )
    return Caller(token.name, token.project, token.scopes, token.id)


def still_may(service: Service, caller: Caller) -> bool:
    """Whether a caller's token is still good, for answers that go on for long."""
    try:
        return not caller.token_id or service.access.is_good(caller.token_id)
    except SQLAlchemyError:  # away: it was good, and what is being told goes on
        return True


def check_scope(caller: Caller, scope: Scope) -> Caller:
    """The caller.

    Raises:
        ProblemError: 403 where the scope is missing.
    """
    if not caller.may(scope):
        raise ProblemError(403, f"this token has no scope {str(scope)!r}", kind="scope-missing")
    return caller


def _needs(scope: Scope) -> Callable[[Caller], Awaitable[Caller]]:
    # Asynchronous, as all dependencies that do not wait: a thread for each would cost more than what they do.
    async def check(caller: Annotated[Caller, Depends(caller_of)]) -> Caller:
        return check_scope(caller, scope)

    return check


async def _service(request: Request) -> Service:
    return service_of(request)


ServiceDep = Annotated[Service, Depends(_service)]
Reader = Annotated[Caller, Depends(_needs(Scope.READ))]
Submitter = Annotated[Caller, Depends(_needs(Scope.SUBMIT))]
Admin = Annotated[Caller, Depends(_needs(Scope.ADMIN))]


def visible(service: Service, caller: Caller, job_id: str) -> JobRecord:
    """A job that the caller may see.

    Raises:
        UnknownJobError: there is none.
    """
    return service.jobs.get(job_id, caller.project)
