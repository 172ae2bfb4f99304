"""Tokens, projects and the audit log: for administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Response

from orchestrator.api.models import (
    AuditEntry,
    AuditLog,
    MadeToken,
    NewToken,
    ProjectInfo,
    ProjectList,
    Quotas,
    TokenInfo,
    TokenList,
)
from orchestrator.api.problems import ProblemError, errors
from orchestrator.api.service import Admin, Caller, ServiceDep
from orchestrator.api.strict import strict_router
from orchestrator.store.access import Project, Token

router = strict_router(prefix="/v1", tags=["access"])
ProjectName = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _everywhere(caller: Caller) -> None:
    if caller.project is not None:
        raise ProblemError(403, "this token administers one project, and this concerns all", kind="scope-missing")


@router.post("/tokens", status_code=201, response_model=MadeToken, responses=errors(404))
def make_token(service: ServiceDep, caller: Admin, new: NewToken) -> MadeToken:
    """Makes a token; its text is shown this once."""
    project = new.project if caller.project is None else caller.project_for(new.project)
    if project is not None and service.access.project(project) is None:
        raise ProblemError(404, f"there is no project {project!r}")
    expires = service.clock() + new.ttl_s if new.ttl_s is not None else None
    token, text = service.access.create_token(new.name, new.scopes, project, expires)
    service.access.note(caller.name, "token.make", token.id, project or "", scopes=sorted(new.scopes))
    return MadeToken(**_token(token).model_dump(), token=text)


@router.get("/tokens", response_model=TokenList, responses=errors())
def list_tokens(service: ServiceDep, caller: Admin) -> TokenList:
    """All tokens without their secrets."""
    found = service.access.tokens()
    return TokenList(tokens=[_token(token) for token in found if caller.project in (None, token.project)])


@router.delete("/tokens/{token_id}", status_code=204, response_class=Response, responses=errors(404))
def revoke_token(
    service: ServiceDep, caller: Admin, token_id: Annotated[str, Path(max_length=32, pattern=r"^[A-Za-z0-9]+$")]
) -> None:
    """Makes a token worthless."""
    if caller.project is not None and not any(
        token.id == token_id and token.project == caller.project for token in service.access.tokens()
    ):
        raise ProblemError(404, f"there is no token {token_id!r}")
    service.access.revoke_token(token_id)
    service.access.note(caller.name, "token.revoke", token_id)


@router.get("/projects", response_model=ProjectList, responses=errors())
def list_projects(service: ServiceDep, caller: Admin) -> ProjectList:
    """Projects with their quotas."""
    found = service.access.projects()
    return ProjectList(projects=[_project(item) for item in found if caller.project in (None, item.name)])


@router.put("/projects/{name}", response_model=ProjectInfo, responses=errors())
def put_project(service: ServiceDep, caller: Admin, name: ProjectName, quotas: Quotas) -> ProjectInfo:
    """Makes a project, or gives it other quotas."""
    _everywhere(caller)
    project = service.access.put_project(name, quotas.max_running, quotas.max_waiting)
    service.access.note(caller.name, "project.put", name, name, **quotas.model_dump())
    service.scheduler.wake()
    return _project(project)


@router.get("/audit", response_model=AuditLog, responses=errors())
def audit(
    service: ServiceDep,
    caller: Admin,
    target: Annotated[str | None, Query(max_length=200)] = None,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditLog:
    """Who did what, the newest first."""
    _everywhere(caller)
    entries = service.access.notes(target=target, before=before, limit=limit)
    return AuditLog(entries=[AuditEntry(**entry) for entry in entries])


def _token(token: Token) -> TokenInfo:
    return TokenInfo(
        id=token.id,
        name=token.name,
        project=token.project,
        scopes=sorted(token.scopes),
        created=token.created,
        expires=token.expires,
        revoked=token.revoked,
    )


def _project(project: Project) -> ProjectInfo:
    return ProjectInfo(
        name=project.name,
        max_running=project.max_running,
        max_waiting=project.max_waiting,
        created=project.created,
    )
