"""Fleets of rollout servers and who has them: readable for all, changed by administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Response
from pydantic import BaseModel, Field

from orchestrator.api.problems import ProblemError, errors
from orchestrator.api.service import Admin, Caller, Reader, Service, ServiceDep
from orchestrator.api.strict import strict_router
from orchestrator.jobs.fleet_file import NAME, NewFleet
from orchestrator.jobs.leases import shares
from orchestrator.jobs.lending import claim_of, fleet_of
from orchestrator.store.fleets import Fleet, LeaseRecord

router = strict_router(prefix="/v1/fleets", tags=["fleets"])
FleetName = Annotated[str, Path(max_length=64, pattern=NAME)]


class ServerInfo(BaseModel):
    """A server of a fleet."""

    name: str
    url: str
    token_variable: str
    healthy: bool = Field(description="Whether it answers its health check.")
    lent: bool
    job_id: str | None = Field(description="Who has it; null: nobody, or a job that the caller may not see.")


class FleetInfo(BaseModel):
    """A fleet with its servers. Times in seconds."""

    name: str
    hold_s: float
    switch_s: float
    drain_s: float
    deadline_s: float
    created: float
    servers: list[ServerInfo]


class FleetList(BaseModel):
    """All fleets, by name."""

    fleets: list[FleetInfo]


class LeaseInfo(BaseModel):
    """A server in the hands of a job. Times are unix seconds."""

    number: int = Field(description="Fencing token: greater than that of each earlier lease.")
    server: str
    job_id: str | None = Field(description="Null: a job that the caller may not see.")
    since: float
    asked: float | None = Field(description="When it was asked back.")
    asked_why: str
    ended: float | None
    ended_why: str


class ShareInfo(BaseModel):
    """What a running job has of a fleet."""

    job_id: str | None = Field(description="Null: a job that the caller may not see.")
    weight: float
    wants: bool = Field(description="Whether it has a use for servers now.")
    held: int = Field(description="Servers that it has now.")
    owed: float = Field(description="Servers that it is owed by its weight and bounds.")
    used: float = Field(description="Server-seconds that it had since its process started.")
    lag: float = Field(description="Server-seconds that it is owed beyond that; negative: it had more than its share.")


class LeaseList(BaseModel):
    """Leases of a fleet, the newest first, and what the running jobs have of it."""

    leases: list[LeaseInfo]
    shares: list[ShareInfo]
    next: int | None = Field(description="Value of `before` for the next page; null on the last one.")


@router.get("", response_model=FleetList, responses=errors())
def list_fleets(service: ServiceDep, caller: Reader) -> FleetList:
    """All fleets, with who has which server."""
    return FleetList(fleets=[_info(service, caller, fleet) for fleet in service.fleets.all()])


@router.get("/{name}", response_model=FleetInfo, responses=errors(404))
def get_fleet(service: ServiceDep, caller: Reader, name: FleetName) -> FleetInfo:
    """One fleet, with who has which server."""
    return _info(service, caller, service.fleets.get(name))


@router.put("/{name}", response_model=FleetInfo, responses=errors())
def put_fleet(service: ServiceDep, caller: Admin, name: FleetName, fleet: NewFleet) -> FleetInfo:
    """Makes a fleet, or changes it; a server that is left out is asked back from the job that has it."""
    _everywhere(caller)
    made = service.fleets.put(name, fleet.terms, [server.record() for server in fleet.servers])
    service.access.note(caller.name, "fleet.put", name, servers=[server.name for server in fleet.servers])
    service.scheduler.wake()
    return _info(service, caller, made)


@router.delete("/{name}", status_code=204, response_class=Response, responses=errors(404, 409))
def delete_fleet(service: ServiceDep, caller: Admin, name: FleetName) -> None:
    """Removes a fleet of which nothing is lent."""
    _everywhere(caller)
    service.fleets.delete(name)
    service.access.note(caller.name, "fleet.delete", name)


@router.get("/{name}/leases", response_model=LeaseList, responses=errors(404))
def list_leases(
    service: ServiceDep,
    caller: Reader,
    name: FleetName,
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> LeaseList:
    """Who has and had which server, and what the running jobs have of the fleet."""
    fleet = service.fleets.get(name)
    found = service.fleets.leases(name, before=before, limit=limit)
    seen = _visible(service, caller, [lease.job_id for lease in found])
    return LeaseList(
        leases=[_lease(lease, seen) for lease in found],
        shares=_shares(service, caller, fleet),
        next=found[-1].number if len(found) == limit else None,
    )


def _everywhere(caller: Caller) -> None:
    if caller.project is not None:
        raise ProblemError(403, "this token administers one project, and this concerns all", kind="scope-missing")


def _visible(service: Service, caller: Caller, job_ids: list[str]) -> set[str]:
    """Of these jobs, those that the caller may see."""
    wanted = set(job_ids)
    return wanted if caller.project is None else wanted & service.jobs.of_project(caller.project, wanted)


def _info(service: Service, caller: Caller, fleet: Fleet) -> FleetInfo:
    lent = {lease.server: lease.job_id for lease in service.fleets.open_leases(fleet.name)}
    seen = _visible(service, caller, list(lent.values()))
    return FleetInfo(
        name=fleet.name,
        hold_s=fleet.terms.hold_s,
        switch_s=fleet.terms.switch_s,
        drain_s=fleet.terms.drain_s,
        deadline_s=fleet.terms.deadline_s,
        created=fleet.created,
        servers=[
            ServerInfo(
                name=server.name,
                url=server.url,
                token_variable=server.token_variable,
                healthy=service.pulse.healthy(server.url),
                lent=server.name in lent,
                job_id=job_id if (job_id := lent.get(server.name)) in seen else None,
            )
            for server in fleet.servers
        ],
    )


def _lease(lease: LeaseRecord, seen: set[str]) -> LeaseInfo:
    return LeaseInfo(
        number=lease.number,
        server=lease.server,
        job_id=lease.job_id if lease.job_id in seen else None,
        since=lease.since,
        asked=lease.asked,
        asked_why=lease.asked_why,
        ended=lease.ended,
        ended_why=lease.ended_why,
    )


def _shares(service: Service, caller: Caller, fleet: Fleet) -> list[ShareInfo]:
    """By the accounts as they were written last, a few seconds ago at most."""
    accounts, held = service.fleets.accounts(fleet.name), service.fleets.open_leases(fleet.name)
    records = [one for one in service.jobs.active() if (use := fleet_of(one.spec)) and use["name"] == fleet.name]
    claims = [claim_of(record) for record in records]
    healthy = sum(service.pulse.healthy(server.url) for server in fleet.servers)
    owed = shares(claims, healthy)
    return [
        ShareInfo(
            job_id=claim.job_id if caller.project in (None, record.project) else None,
            weight=claim.weight,
            wants=claim.wants,
            held=sum(lease.job_id == claim.job_id for lease in held),
            owed=owed.get(claim.job_id, 0.0),
            used=accounts[claim.job_id].used if claim.job_id in accounts else 0.0,
            lag=accounts[claim.job_id].lag if claim.job_id in accounts else 0.0,
        )
        for record, claim in zip(records, claims, strict=True)
    ]


def servers_by_state(service: Service) -> dict[str, dict[str, int]]:
    """Of each fleet, servers that are lent, free, or do not answer."""
    found: dict[str, dict[str, int]] = {}
    for fleet in service.fleets.all():
        lent = {lease.server for lease in service.fleets.open_leases(fleet.name)}
        counts = found[fleet.name] = dict.fromkeys(("lent", "free", "away"), 0)
        for server in fleet.servers:
            healthy = service.pulse.healthy(server.url)
            counts["away" if not healthy else "lent" if server.name in lent else "free"] += 1
    return found
