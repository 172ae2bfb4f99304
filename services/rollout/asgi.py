"""Small pieces of ASGI: bodies read and replayed, answers, and the status that passes by."""

from __future__ import annotations

import json
from typing import Any

from services.rollout.guard import Message, Receive, Scope, Send

#: A request is a prompt of token ids, a weight update at most a list of handles.
_LARGEST_BODY = 256 << 20


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


def headers_of(scope: Scope) -> dict[str, str]:
    """Request headers with names in lower case."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request.

    Raises:
        ClientGoneError: it never came in whole.
        ValueError: it is too long.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _LARGEST_BODY:
            raise ValueError(f"request of more than {_LARGEST_BODY} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body that was read already, and then what comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class StatusWatch:
    """A ``send`` that remembers the status of the answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500

    async def __call__(self, message: Message) -> None:
        """Passes a message on."""
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
        await self._send(message)


async def answer_json(send: Send, status: int, value: dict[str, Any]) -> None:
    """Answers with a JSON body."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
