"""Serves the folder of published weights by HTTP, for rollout servers that do not share it.

    GET /weights/{number}.safetensors    bearer token; ranges, so that a broken transfer is taken up again

Files appear in the folder by rename and never change, so that whoever opens one reads it whole. The server runs in a
thread of the process that owns the folder: what was published last stays at hand while the trainer is away.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import threading
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nightshift.wire.errors import RoleError, RoleTimeoutError

#: Path of the folder in the server's addresses.
PREFIX = "/weights"
_NAME = re.compile(r"[0-9]+\.safetensors")
_START_S = 10.0
_STOP_S = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class _File(FileResponse):
    chunk_size = 1 << 20


def application(store: Path, token: str) -> Starlette:
    """The ASGI application.

    Args:
        store: folder of the published files.
        token: bearer token without which nothing is told.
    """
    expected = f"Bearer {token}".encode()

    async def serve(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            return _error(401, "the weight server needs the run's token")
        name = request.path_params["name"]
        path = store / name
        if not _NAME.fullmatch(name) or not path.is_file():
            return _error(404, f"there is no weight file {name!r}: the newest two publications are kept")
        return _File(path, media_type="application/octet-stream")

    return Starlette(routes=[Route(f"{PREFIX}/{{name}}", serve, methods=["GET"])])


class WeightServer:
    """The server.

    Attributes:
        url: address of the folder.
        token: for its bearer header.

    Args:
        store: folder of the published files.
        host: name or address under which rollout servers reach it; it listens on that address where it is loopback,
            else on all.
        port: 0: any free one.
    """

    def __init__(self, store: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.token = secrets.token_urlsafe(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        everywhere = "::" if family is socket.AF_INET6 else "0.0.0.0"
        try:
            self._listener.bind((host if host in _LOOPBACK else everywhere, port))
        except OSError as error:
            self._listener.close()
            raise RoleError(
                f"the weight server cannot listen on port {port}: {error}",
                role="trainer",
                fix="Set resources.ports.weights to a free port, or to 0 for any free one",
            ) from error
        number = self._listener.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{number}{PREFIX}"
        config = uvicorn.Config(
            application(store, self.token), log_level="warning", access_log=False, lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="weight-server", daemon=True
        )

    def start(self) -> None:
        """Starts it, and waits until it listens.

        Raises:
            RoleTimeoutError: it did not within a few seconds.
        """
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RoleTimeoutError(f"the weight server did not listen within {_START_S:g} s", role="trainer")
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends it; transfers that are under way break off."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._listener.close()


def _error(status: int, text: str) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"error": {"code": status, "message": text}}, status, headers)
