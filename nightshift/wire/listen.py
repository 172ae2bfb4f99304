"""Where the services of an agent listen, and who may call them.

On a machine of their own they listen on loopback, and ask for no token. An agent that works for another host
(:mod:`services.agent.host`) names itself and a token in the environment; its services then listen on every interface,
and answer who has the token. The token travels in the clear: that network must be one's own.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping
from typing import Any

from nightshift.wire.errors import BadInputError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
#: Name or address under which other hosts reach this one; without it, or where it is loopback, none can.
HOST_VARIABLE = "NIGHTSHIFT_HOST"
#: What callers of the services of this run must show; without it they show nothing.
TOKEN_VARIABLE = "NIGHTSHIFT_RUN_TOKEN"

_AUTHORIZATION = "authorization"


def reached_as(environment: Mapping[str, str] = os.environ) -> str:
    """Name or address that the addresses of the services are made of."""
    return environment.get(HOST_VARIABLE) or "127.0.0.1"


def listen_on(environment: Mapping[str, str] = os.environ) -> str:
    """Address that they listen on.

    Raises:
        BadInputError: it can be reached from elsewhere, and no token is set.
    """
    host = reached_as(environment)
    if host in LOOPBACK:
        return "127.0.0.1"
    if not environment.get(TOKEN_VARIABLE):
        raise BadInputError(
            f"{HOST_VARIABLE} is {host!r}, so that services would listen on every interface, and {TOKEN_VARIABLE} is "
            "not set",
            role="agent",
            fix=f"Unset {HOST_VARIABLE}, or start the services by services.agent.host, which makes a token",
        )
    return "0.0.0.0"


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a caller adds to the metadata of a gRPC call; nothing without a token."""
    return ((_AUTHORIZATION, f"Bearer {token}"),) if token else ()


def allowed(pairs: Iterable[Any] | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a call with this metadata, as (name, value) pairs, may be answered."""
    token = environment.get(TOKEN_VARIABLE, "")
    if not token:
        return True
    given = [value for name, value in pairs or () if name.lower() == _AUTHORIZATION]
    if len(given) != 1:
        return False
    value = given[0] if isinstance(given[0], bytes) else str(given[0]).encode()
    return hmac.compare_digest(value, f"Bearer {token}".encode())
