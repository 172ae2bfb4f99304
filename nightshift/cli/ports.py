"""Ports on loopback."""

from __future__ import annotations

import socket

from nightshift.config import JobSpec
from nightshift.wire.errors import BadInputError

HOST = "127.0.0.1"


def fixed_ports(spec: JobSpec) -> dict[str, int]:
    """Role -> port, of those that the job fixes and needs on this machine."""
    ports = spec.resources.ports.model_dump()
    if not spec.rollout.own_servers:
        ports.pop("rollout")
    elif ports["rollout"]:
        ports |= {f"rollout (server {at})": ports["rollout"] + at for at in range(1, spec.rollout.servers)}
    return {role: port for role, port in ports.items() if port}


def check_ports(spec: JobSpec) -> None:
    """Checks that the fixed ports differ and are free.

    Raises:
        BadInputError: names the role and the port.
    """
    seen: dict[int, str] = {}
    for role, port in fixed_ports(spec).items():
        if port in seen:
            raise BadInputError(
                f"port {port} is given to {seen[port]} too",
                role=role,
                fix=f"Set resources.ports.{role} to another port, or to 0 for any free one",
            )
        seen[port] = role
        if not is_free(port):
            raise BadInputError(
                f"port {port} is taken by another program",
                role=role,
                fix=f"End that program, or set resources.ports.{role} to another port, or to 0 for any free one",
            )


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((HOST, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])
