"""A gRPC stub that calls its servicer: the same messages, without sockets and threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc.aio import AioRpcError, Metadata


class _Context:
    """What servicers ask of a context."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the call."""
        return self._metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with an error."""
        raise AioRpcError(code, Metadata(), Metadata(), details)


class InProcessStub:
    """Stands for the stub of a service whose servicer is in this process. Deadlines are those of the event loop."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._servicer, name)

        async def call(request: Any, **options: Any) -> Any:
            try:
                async with asyncio.timeout(options.get("timeout")):
                    return await method(request, _Context(options.get("metadata", ())))
            except TimeoutError:
                raise AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(), "deadline") from None

        return call
