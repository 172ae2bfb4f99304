"""An ASGI application on loopback, in the loop of its test."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn


async def serve(app: Any, port: int) -> tuple[uvicorn.Server, int]:
    """Serves an application on a port, or any free one for 0; the server, and the port that it has."""
    # The protocol is named so that asyncio turns Nagle's algorithm off, which would delay each answer by 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        interface="asgi3",
        lifespan="off",
        log_level="error",
        access_log=False,
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=60,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    return server, int(listener.getsockname()[1])
