"""Keeps Serve on loopback, or opens its proxy alone for an agent that works for another host.

Serve's gRPC options have a port and no host: the proxy's server listens on every interface, and so does a server that
each replica starts for calls from other deployments (pickled ones). Code of ours runs before either starts: in the
proxy by Serve's HTTP proxy callback, which is used for this alone, and in a replica by its constructor. Deployment
checks afterwards where the proxy's port really listens, and a test does so for every process, so that a release of
Serve which starts its servers in another way is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nightshift.wire import listen

LOOPBACK = "127.0.0.1"
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "services.scorers.ingress.bind_to_loopback"
#: Environment of the process that starts Ray, set before it imports ray: Ray reads some of it at import, and its
#: processes inherit it.
RAY_ENVIRONMENT = {
    CALLBACK_VARIABLE: CALLBACK,
    # By default workers run at a low priority, and a replica beside a busy trainer then hardly gets to start.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The name is odd, the effect is the one wanted: a node address of 127.0.0.1 stays, so that Ray's own servers listen
    # on loopback; otherwise Ray replaces it by an address that other machines can reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
_LISTEN = "0A"
_LOOPBACKS = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def bind_to_loopback() -> list[Any]:
    """Serve's HTTP proxy callback; returns no middleware. Where others are to reach it, it opens the proxy."""
    from ray.serve._private import default_impl

    default_impl.add_grpc_address = _at(listen.listen_on(), default_impl.add_grpc_address)
    return []


def bind_replica_to_loopback() -> None:
    """Called in a replica's constructor; its server for other deployments starts when that has returned."""
    from ray.serve._private import replica

    replica.add_port_to_grpc_server = _at(LOOPBACK, replica.add_port_to_grpc_server)


def _at(host: str, add_address: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda server, address: add_address(server, f"{host}:{address.rpartition(':')[2]}")


def listens_beyond_loopback(port: int) -> bool:
    """Whether a TCP socket of this machine listens on the port at an address other than loopback (Linux)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTEN and int(number, 16) == port and address not in _LOOPBACKS:
                return True
    return False
