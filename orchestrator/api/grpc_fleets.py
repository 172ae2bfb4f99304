"""gRPC's ``FleetService``: the same calls as REST's ``/v1/fleets``, carried out by the same functions."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import json_format
from pydantic import ValidationError

from nightshift.wire.v1 import fleets_pb2, fleets_pb2_grpc
from orchestrator.api import routes_fleets
from orchestrator.api.grpc_calls import Servicer, call, limit_of
from orchestrator.api.problems import ProblemError, wrong_values
from orchestrator.api.service import Caller
from orchestrator.jobs.fleet_file import NAME, NewFleet
from orchestrator.store.access import Scope

_PAGE = 100


class FleetServicer(Servicer, fleets_pb2_grpc.FleetServiceServicer):
    """Answers gRPC calls for a service."""

    service_name = "FleetService"

    @call(Scope.READ)
    def List(self, caller: Caller, request: Any) -> Any:
        """All fleets, with who has which server."""
        found = routes_fleets.list_fleets(self._service, caller).fleets
        return fleets_pb2.ListFleetsResponse(fleets=[_fleet(one) for one in found])

    @call(Scope.READ)
    def Get(self, caller: Caller, request: Any) -> Any:
        """One fleet, with who has which server."""
        return _fleet(routes_fleets.get_fleet(self._service, caller, request.name))

    @call(Scope.ADMIN)
    def Put(self, caller: Caller, request: Any) -> Any:
        """Makes a fleet, or changes it."""
        if not re.fullmatch(NAME, request.name):
            raise ProblemError(422, f"name: must match {NAME}", errors=[("name", f"must match {NAME}")])
        values = json_format.MessageToDict(request, preserving_proto_field_name=True)
        values.pop("name")
        try:
            fleet = NewFleet.model_validate({"servers": []} | values)
        except ValidationError as error:
            named, fields = wrong_values(error.errors())
            raise ProblemError(422, named, kind="bad-parameter", errors=fields) from error
        return _fleet(routes_fleets.put_fleet(self._service, caller, request.name, fleet))

    @call(Scope.ADMIN)
    def Delete(self, caller: Caller, request: Any) -> Any:
        """Removes a fleet of which nothing is lent."""
        routes_fleets.delete_fleet(self._service, caller, request.name)
        return fleets_pb2.DeletedFleet()

    @call(Scope.READ)
    def Leases(self, caller: Caller, request: Any) -> Any:
        """Who has and had which server, and what the running jobs have of the fleet."""
        if request.before < 0:
            text = "before must be what `next` of the page before says"
            raise ProblemError(422, text, errors=[("before", "0 or more")])
        limit = limit_of(request.limit, otherwise=_PAGE, most=1000)
        before = request.before or None
        found = routes_fleets.list_leases(self._service, caller, request.name, before=before, limit=limit)
        return fleets_pb2.LeasesResponse(
            leases=[fleets_pb2.Lease(**one.model_dump(exclude_none=True)) for one in found.leases],
            shares=[fleets_pb2.Share(**one.model_dump(exclude_none=True)) for one in found.shares],
            next=found.next or 0,
        )


def _fleet(found: routes_fleets.FleetInfo) -> Any:
    return fleets_pb2.Fleet(**found.model_dump(exclude_none=True))
