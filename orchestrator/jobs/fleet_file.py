"""Fleets as they are registered, by a request or by a file of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from nightshift.config.messages import explain_value
from nightshift.wire.errors import BadInputError
from orchestrator.jobs.leases import Terms
from orchestrator.store.fleets import FleetServer, FleetStore

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
TOKEN_VARIABLE = "NIGHTSHIFT_ROLLOUT_TOKEN"
_Name = Annotated[str, Field(pattern=NAME)]
_SERVERS = 1000


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class NewServer(_Part):
    """A rollout server of a fleet."""

    name: _Name = Field(description="Name in logs and metrics of the jobs; one of its kind in the fleet.")
    url: str = Field(
        pattern=r"^https?://[A-Za-z0-9\[\]:._-]{1,200}(/[A-Za-z0-9/._-]{0,200})?$",
        description="Where it listens; a server belongs to one fleet.",
    )
    # Any variable of the service, sent to any address, would be more than a token of the servers.
    token_variable: str = Field(
        default=TOKEN_VARIABLE,
        pattern=r"^NIGHTSHIFT_ROLLOUT_TOKEN(_[A-Z0-9_]{1,80})?$",
        description="Variable of the service's environment that holds its token.",
    )

    def record(self) -> FleetServer:
        """As it is stored."""
        return FleetServer(self.name, self.url.rstrip("/"), self.token_variable)


class NewFleet(_Part):
    """Servers of one model that are lent to jobs in turns, and on which terms. Times in seconds."""

    servers: list[NewServer] = Field(max_length=_SERVERS)
    hold_s: float = Field(default=300.0, ge=0, le=1e6, description="For which a job keeps a server at least.")
    switch_s: float = Field(
        default=10.0, ge=0, le=1e5, description="That a change of jobs costs a server; leases last ten times that."
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=1e5, description="For which responses may end on a server that was asked back."
    )
    deadline_s: float = Field(
        default=90.0, gt=0, le=1e5, description="After which a lease that was asked back ends by itself."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for what, values in {
            "name": [one.name for one in self.servers],
            "url": [one.url for one in self.servers],
        }.items():
            if len(set(values)) < len(values):
                raise ValueError(f"servers: each needs a {what} of its own")
        if self.deadline_s <= self.drain_s:
            raise ValueError(f"deadline_s must be more than drain_s {self.drain_s:g}")
        return self

    @property
    def terms(self) -> Terms:
        """On which its servers are lent."""
        return Terms(self.hold_s, self.switch_s, self.drain_s, self.deadline_s)


_FILE = TypeAdapter(dict[_Name, NewFleet])


def read_fleets(path: Path) -> dict[str, NewFleet]:
    """Fleets of a YAML file: name -> servers and terms.

    Raises:
        BadInputError: it cannot be read, or something in it is wrong.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _FILE.validate_python(found or {})
    except OSError as error:
        raise BadInputError(f"the file of fleets {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInputError(f"the file of fleets {path} is no YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f": {name}" for name in [".".join(map(str, first["loc"]))] if name)
        raise BadInputError(
            f"the file of fleets {path}{place} {explain_value(first)}",
            fix="It maps a fleet's name to servers (each with name and url), hold_s, switch_s, drain_s and deadline_s",
        ) from error


def register(fleets: FleetStore, found: dict[str, NewFleet]) -> None:
    """Makes the fleets of a file, or changes them to what it says. Others stay as they are."""
    for name, fleet in found.items():
        fleets.put(name, fleet.terms, [server.record() for server in fleet.servers])
