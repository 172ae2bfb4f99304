"""``python -m orchestrator.api``: the job service as a process; ``nightshift up`` becomes it."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import ipaddress
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from nightshift.wire import logs
from nightshift.wire.errors import BadInputError, NightshiftError
from orchestrator.api.app import make_app
from orchestrator.api.config import ServiceConfig
from orchestrator.api.service import Service
from orchestrator.jobs.fleet_file import read_fleets, register
from orchestrator.runner.files import raise_limit

TOKEN_FILE = "admin-token"
_GRACE_S = 5


def main() -> int:
    """Serves until it is stopped; the exit code is that of the command line."""
    parser = argparse.ArgumentParser(prog="nightshift up")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--grpc-port", type=int)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--allow-path", type=Path, action="append", default=[])
    parser.add_argument("--fleets", type=Path)
    parser.add_argument("--no-token", action="store_true")
    parser.add_argument("--drain-seconds", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)  # JSON; for tests
    parser.add_argument("--tick-s", type=float, default=0.5, help=argparse.SUPPRESS)  # for tests
    arguments = parser.parse_args()
    logs.setup("orchestrator")
    try:
        return _serve(arguments)
    except NightshiftError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except SQLAlchemyError as error:
        print(f"error: [orchestrator] the database does not answer: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or ''} {error.strerror}".replace("  ", " "), file=sys.stderr)
        return 1


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.no_token and not is_loopback(arguments.host):
        raise BadInputError(
            f"--no-token serves whoever reaches the port, and {arguments.host} is not loopback",
            fix="Leave --no-token out, or use --host 127.0.0.1",
        )
    data_dir: Path = arguments.data_dir.expanduser().resolve()
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    raise_limit()
    with _alone(data_dir):
        name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        settings = {"command": json.loads(arguments.command)} if arguments.command else {}
        config = ServiceConfig(
            data_dir=data_dir,
            database_url=os.environ.get("NIGHTSHIFT_DATABASE_URL", ""),
            require_token=not arguments.no_token,
            allowed=[path.expanduser().resolve() for path in arguments.allow_path],
            at_once=arguments.at_once,
            grpc=f"{name}:{arguments.grpc_port}" if arguments.grpc_port is not None else "",
            tick_s=arguments.tick_s,
            **settings,
        )
        fleets = read_fleets(arguments.fleets.expanduser()) if arguments.fleets else {}
        listening = listen(arguments.host, arguments.port)
        service = Service(config)
        register(service.fleets, fleets)
        _keep_token(service, data_dir / TOKEN_FILE)
        url = f"http://{name}:{listening.getsockname()[1]}"
        server = _Server(
            uvicorn.Config(
                make_app(service),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
            ),
            lambda: _announce(url, service.grpc_port, data_dir, arguments),
            (lambda: service.scheduler.drain(arguments.drain_seconds)) if arguments.drain_seconds > 0 else None,
        )
        asyncio.run(server.serve([listening]))
        left = service.scheduler.driven
        if left:
            print(f"{len(left)} jobs go on; start the service again to follow them", file=sys.stderr)
    return 0


class _Server(uvicorn.Server):
    """Says that it listens; and before it ends on a signal, lets jobs end, while it still answers."""

    def __init__(self, config: uvicorn.Config, ready: object, drain: Callable[[], object] | None) -> None:
        super().__init__(config)
        self._ready = ready
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal drains, a second one ends at once."""
        drain, self._drain = self._drain, None
        if drain is None:
            super().handle_exit(sig, frame)
            return

        def work() -> None:
            try:
                drain()
            finally:
                uvicorn.Server.handle_exit(self, sig, None)

        threading.Thread(target=work, name="drain", daemon=True).start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says that it listens, once it does."""
        await super().startup(sockets)
        if self.started and callable(self._ready):
            self._ready()


def is_loopback(host: str) -> bool:
    """Whether a host to listen on is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(url: str, grpc_port: int, data_dir: Path, arguments: argparse.Namespace) -> None:
    if arguments.json:
        token = None if arguments.no_token else str(data_dir / TOKEN_FILE)
        found = {"kind": "service", "url": url, "grpc_port": grpc_port or None, "token_file": token, "pid": os.getpid()}
        print(json.dumps(found), flush=True)
        return
    print(f"listening on {url}; data in {data_dir}", flush=True)
    if grpc_port:
        print(f"gRPC on port {grpc_port}", flush=True)
    if not arguments.no_token:
        print(f"administrator's token: {data_dir / TOKEN_FILE}", flush=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, for the server to listen on.

    Raises:
        BadInputError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol by name, asyncio sends at once what it is given (TCP_NODELAY). Else the body of an answer waits
    # behind its head for the client's acknowledgement: 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise BadInputError(f"cannot listen on {host}:{port}: {error.strerror}", fix="Choose another --port") from error
    return listening


def _keep_token(service: Service, path: Path) -> None:
    """Writes the first administrator's token to a file that its owner alone can read."""
    text = service.first_token()
    if text is not None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text + "\n")


@contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    with (data_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInputError(
                f"another service uses {data_dir}", fix="Stop it, or choose another --data-dir"
            ) from error
        yield


if __name__ == "__main__":
    sys.exit(main())
