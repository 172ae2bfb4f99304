"""ASGI middleware in front of vLLM: a bearer token, an allow-list of the routes that are used, and a fence of leases.

vLLM's own ``--api-key`` leaves its administrative routes open, and some of its routes (calls into workers, loading of
adapters) are never needed here: what is not on the list does not exist, with or without a token.

A server of a fleet works for one lease after the other. A request that carries the fencing token of its lease passes as
long as none of a newer lease came before it: a job that hung, and comes back after its server was lent to another one,
can neither push its weights nor draw. A request without one belongs to no lease, and is not checked. What was seen is
remembered by this process alone, whose end also loses the weights.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nightshift.wire.lease_fence import HEADER, LEASE_OVER, Fence, LeaseFence
from nightshift.wire.rollout import INFO, PREFETCH, REQUESTS, ROUTE

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Where the token is taken from at start.
TOKEN_VARIABLE = "NIGHTSHIFT_ROLLOUT_TOKEN"
#: Set in the scope of a request that may pass, for what stands behind the guard.
AUTHENTICATED = "nightshift.authenticated"

_GET = frozenset({"GET", "HEAD"})
_POST = frozenset({"POST"})

#: Routes that tell nothing about requests or weights, open to probes and to Prometheus.
OPEN_ROUTES = {
    "/health": _GET,
    "/ping": _GET,
    "/version": _GET,
    "/metrics": _GET,
    "/metrics/": _GET,
}

#: Routes behind the token.
TOKEN_ROUTES = {
    ROUTE: _POST,
    INFO: _GET,
    PREFETCH: _POST,
    REQUESTS: _GET,
    "/inference/v1/generate": _POST,
    "/inference/v1/abort_requests": _POST,
    "/abort_requests": _POST,
    "/v1/completions": _POST,
    "/v1/models": _GET,
    "/pause": _POST,
    "/resume": _POST,
    "/is_paused": _GET,
    "/sleep": _POST,
    "/wake_up": _POST,
    "/is_sleeping": _GET,
    "/init_weight_transfer_engine": _POST,
    "/start_weight_update": _POST,
    "/update_weights": _POST,
    "/finish_weight_update": _POST,
    "/weight_info": _GET,
    "/get_world_size": _GET,
    "/reset_prefix_cache": _POST,
}


def decide(method: str, path: str, authorization: list[bytes], token: bytes) -> int:
    """Status of a request: 200 to pass it on, else 401, 403 (no such route here) or 405.

    Args:
        authorization: values of all Authorization headers; exactly one is accepted.
    """
    if path in OPEN_ROUTES:
        return 200 if method in OPEN_ROUTES[path] else 405
    if len(authorization) != 1 or not _is_bearer(authorization[0], token):
        return 401
    if path not in TOKEN_ROUTES:
        return 403
    return 200 if method in TOKEN_ROUTES[path] else 405


def _is_bearer(value: bytes, token: bytes) -> bool:
    scheme, _, given = value.partition(b" ")
    # compare_digest takes as long for a wrong token as for the right one.
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token)


_REASONS = {
    401: ("unauthorized", "a bearer token is needed"),
    403: ("forbidden", "this route is not offered"),
    405: ("method_not_allowed", "this route does not take this method"),
}


class Guard:
    """The middleware, for ``--middleware services.rollout.guard.Guard``.

    Raises:
        RuntimeError: no token in the environment; a server without one must not start.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set")
        self._app = app
        self._token = token.encode()
        self._fence = Fence()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on or answers it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is None:
                scope[AUTHENTICATED] = True
                await self._app(scope, receive, send)
            else:
                await _answer(send, *refusal)
        elif scope["type"] == "websocket":
            # Closing before accepting is how ASGI refuses the handshake (403).
            await send({"type": "websocket.close", "code": 1008, "reason": "websockets are not offered"})

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, kind and sentence with which a request is refused; None: it may pass."""
        status = decide(scope["method"], scope["path"], _values(scope, b"authorization"), self._token)
        if status != 200:
            return (status, *_REASONS[status])
        leases = _values(scope, HEADER.encode())
        # What only asks may come late: the request log of a lease is read after its end.
        if not leases or scope["method"] != "POST":
            return None
        try:
            lease = LeaseFence.parse(b",".join(leases).decode("latin-1"))
        except ValueError as error:
            return 400, "bad_lease", str(error)
        return None if self._fence.admits(lease) else (409, LEASE_OVER, self._fence.refusal(lease))


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


async def _answer(send: Send, status: int, kind: str, text: str) -> None:
    body = json.dumps({"error": {"code": status, "type": kind, "message": text}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
