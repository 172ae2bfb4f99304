"""``python -m services.agent.host``: starts roles of runs on this machine for a runner on another one.

    PUT    /v1/runs/{run}                starts roles for a run: ``job`` (YAML), ``files``, ``roles``, ``otlp``
    GET    /v1/runs/{run}                state, addresses and what happened since; ends with the run if nobody asks
    DELETE /v1/runs/{run}                ends them; checkpoints stay
    GET    /v1/runs/{run}/files/{path}   a file below ``checkpoints`` or ``logs`` (ranges), or what a folder holds
    DELETE /v1/runs/{run}/files/{path}   removes a folder below ``checkpoints``
    GET    /health

One run at a time: its services have the machine. All but the health check ask for ``NIGHTSHIFT_AGENT_TOKEN``; whoever
has it may run code here (reward functions travel with a job). The calls are in the clear: use a network of your own.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nightshift.config.load import parse_job, write_resolved
from nightshift.wire import listen, logs
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError
from nightshift.wire.events import parse_line
from services.agent.models import resolve
from services.agent.remote import TOKEN_VARIABLE
from services.rollout.keeper import die_with_parent

_log = logging.getLogger(__name__)
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ROLES = frozenset({"trainer", "scorers"})
_READABLE = ("checkpoints", "logs")
_MAX_BODY = 64 << 20
#: Seconds without a question after which a run's services are ended: its runner is gone.
_IDLE_S = 300.0
_STOP_S = 100.0
_KILL_S = 30.0
_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Machine:
    """How this machine is reached, and what it does differently from what a job says.

    Attributes:
        data: folder of the runs.
        host: name or address under which runner and rollout servers reach it.
        ports: role -> fixed port ("trainer", "scorers", "weights"); 0: any free one.
        overrides: ``key=value`` of the job file, for instance ``model.path`` where models lie elsewhere here.
    """

    data: Path
    host: str
    ports: dict[str, int]
    overrides: Sequence[str] = ()


@dataclass(slots=True)
class _Run:
    """One start of the services of a run."""

    run_id: str
    folder: Path
    process: subprocess.Popen[bytes]
    session: str = field(default_factory=lambda: secrets.token_hex(4))
    asked: float = field(default_factory=time.monotonic)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Host:
    """The runs of this machine. All methods but :meth:`begin` may be called from any thread.

    Args:
        token: that callers show; the tokens of runs are made of it, so that another start of this host has the same.
        command: of the agent of a run, without its arguments; for tests.
    """

    def __init__(self, machine: Machine, token: str, command: Sequence[str] | None = None) -> None:
        self._machine = machine
        self._token = token
        self._command = list(command or [sys.executable, "-P", "-m", "services.agent"])
        self._run: _Run | None = None
        self._lock = threading.Lock()

    def folder(self, run_id: str) -> Path:
        """The folder of a run.

        Raises:
            BadInputError: the id is none.
        """
        if not _RUN.fullmatch(run_id) or ".." in run_id:
            raise BadInputError(f"{run_id!r} is no id of a run", role="agent")
        return self._machine.data / "runs" / run_id

    def run_token(self, run_id: str) -> str:
        """What callers of a run's services show."""
        return hmac.new(self._token.encode(), run_id.encode(), hashlib.sha256).hexdigest()

    def begin(self, run_id: str, request: dict[str, Any]) -> None:
        """Starts the services of a run, unless they run already. From the main thread alone: they end with it.

        Raises:
            BadInputError: the request is none, or the machine is at work for another run.
            RoleError: the services of an earlier start are ending just now.
        """
        folder = self.folder(run_id)
        roles = {str(role) for role in request.get("roles", [])}
        if not roles or roles - _ROLES:
            raise BadInputError(f"roles must be some of {sorted(_ROLES)}, got {sorted(roles)}", role="agent")
        if not self._lock.acquire(blocking=False):
            raise RoleError("the services of an earlier start are ending just now", role="agent")
        try:
            known = self._run
            if known is not None and known.alive:
                if known.run_id == run_id:
                    known.asked = time.monotonic()
                    return
                raise BadInputError(
                    f"this host is at work for the run {known.run_id}",
                    role="agent",
                    fix="Wait for its end, or give the job another host in resources.agents",
                )
            self._prepare(folder, request)
            self._run = _Run(run_id, folder, self._start(folder, roles, request.get("otlp")))
        finally:
            self._lock.release()

    def status(self, run_id: str, session: str, offset: int) -> dict[str, Any] | None:
        """State, addresses and events of a run since ``offset`` of ``session``; None: nothing of it was started."""
        run = self._run
        if run is None or run.run_id != run_id:
            return None
        run.asked = time.monotonic()
        alive = run.alive  # asked first: what it wrote at its end is read then
        services = _read_json(run.folder / "services.json")
        events, end = _events(run.folder / "events.jsonl", offset if session == run.session else 0)
        state = ("ready" if services else "starting") if alive else "ended"
        return {
            "session": run.session,
            "state": state,
            "code": run.process.poll(),
            "services": services if alive else None,
            "folder": str(run.folder),
            "host": self._machine.host,
            "token": self.run_token(run_id),
            "events": events,
            "next": end,
        }

    def end(self, run_id: str | None = None) -> None:
        """Ends the services of a run, or those of any."""
        with self._lock:
            run = self._run
            if run is None or (run_id is not None and run.run_id != run_id):
                return
            if run.alive:
                run.process.terminate()
                try:
                    run.process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    _log.warning("the agent of %s did not end within %.0f s and is killed", run.run_id, _STOP_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(run.process.pid, signal.SIGKILL)
            try:
                run.process.wait(_KILL_S)
            except subprocess.TimeoutExpired as error:
                raise RoleError(
                    f"the agent of {run.run_id} (process {run.process.pid}) still runs {_KILL_S:.0f} s after kill -9",
                    role="agent",
                    fix="Look at what it waits for: a device or a file system that does not answer",
                ) from error
            self._run = None

    def end_idle(self, idle_s: float = _IDLE_S) -> None:
        """Ends the services of a run that nobody has asked about for so long."""
        run = self._run
        if run is not None and run.alive and time.monotonic() - run.asked > idle_s:
            _log.warning("nobody has asked for the run %s for %.0f s: its services are ended", run.run_id, idle_s)
            self.end(run.run_id)

    def file(self, run_id: str, name: str) -> Path:
        """A file or folder of a run that may be read.

        Raises:
            BadInputError: it lies elsewhere.
        """
        folder = self.folder(run_id).resolve()
        path = (folder / name).resolve()
        if not any((folder / room) == path or (folder / room) in path.parents for room in _READABLE):
            raise BadInputError(f"{name!r} lies outside {' and '.join(_READABLE)} of the run", role="agent")
        return path

    def remove(self, run_id: str, name: str) -> None:
        """Removes a folder below ``checkpoints``; harmless where it is gone.

        Raises:
            BadInputError: it lies elsewhere.
        """
        path = self.file(run_id, name)
        if self.folder(run_id).resolve() / "checkpoints" not in path.parents:
            raise BadInputError(f"{name!r} is no checkpoint", role="agent")
        shutil.rmtree(path, ignore_errors=True)

    def _prepare(self, folder: Path, request: dict[str, Any]) -> None:
        for name in ("logs", "checkpoints", "inputs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("services.json", "events.jsonl"):  # of an earlier start
            (folder / name).unlink(missing_ok=True)
        for name, content in request.get("files", {}).items():
            path = (folder / "inputs" / name).resolve()
            if (folder / "inputs").resolve() not in path.parents:
                raise BadInputError(f"{name!r} is no name of a file", role="agent")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        ports = [f"resources.ports.{role}={port}" for role, port in self._machine.ports.items()]
        more = [*ports, f"resources.weight_host={self._machine.host}", f"resources.runs_dir={self._machine.data}"]
        spec = parse_job(
            str(request["job"]).encode(), folder, [*more, *self._machine.overrides], source="the job", check_files=False
        )
        write_resolved(spec, folder / "job.yaml")

    def _start(self, folder: Path, roles: set[str], otlp: str | None) -> subprocess.Popen[bytes]:
        command = [*self._command, "--run-dir", str(folder), "--roles", ",".join(sorted(roles))]
        paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        environment |= {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            "PYTHONUNBUFFERED": "1",
            listen.HOST_VARIABLE: self._machine.host,
            listen.TOKEN_VARIABLE: self.run_token(folder.name),
        }
        with (folder / "logs" / "agent.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *(["--otlp", otlp] if otlp else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )


def application(host: Host, token: str) -> Starlette:
    """The ASGI application."""
    expected = f"Bearer {token}".encode()

    def guarded(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
                return _problem(401, "the agent needs its token")
            try:
                return await handle(request)
            except BadInputError as error:
                return _problem(422, error.message, error.fix)
            except NightshiftError as error:
                return _problem(503, error.message, error.fix)

        return answer

    async def put(request: Request) -> Response:
        size = int(request.headers.get("content-length", "0") or 0)
        if size > _MAX_BODY:
            return _problem(413, f"a request may have {_MAX_BODY} bytes")
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict) or not isinstance(body.get("job"), str):
                raise ValueError("it has no 'job'")
            host.begin(request.path_params["run"], body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _problem(400, f"the request is none: {error}")
        return JSONResponse({}, 202)

    async def get(request: Request) -> Response:
        offset = int(request.query_params.get("events", "0") or 0)
        session = request.query_params.get("session", "")
        status = await run_in_threadpool(host.status, request.path_params["run"], session, offset)
        return _problem(404, "nothing was started for this run") if status is None else JSONResponse(status)

    async def delete(request: Request) -> Response:
        await run_in_threadpool(host.end, request.path_params["run"])
        return JSONResponse({})

    async def read(request: Request) -> Response:
        path = host.file(request.path_params["run"], request.path_params["path"])
        if path.is_dir():
            files = [p for p in sorted(path.rglob("*")) if p.is_file()]
            return JSONResponse(
                {"files": [{"path": p.relative_to(path).as_posix(), "bytes": p.stat().st_size} for p in files]}
            )
        if not path.is_file():
            return _problem(404, f"there is no {request.path_params['path']!r}")
        return FileResponse(path, media_type="application/octet-stream")

    async def remove(request: Request) -> Response:
        await run_in_threadpool(host.remove, request.path_params["run"], request.path_params["path"])
        return JSONResponse({})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/runs/{run}", guarded(put), methods=["PUT"]),
            Route("/v1/runs/{run}", guarded(get), methods=["GET"]),
            Route("/v1/runs/{run}", guarded(delete), methods=["DELETE"]),
            Route("/v1/runs/{run}/files/{path:path}", guarded(read), methods=["GET"]),
            Route("/v1/runs/{run}/files/{path:path}", guarded(remove), methods=["DELETE"]),
        ]
    )


def main() -> None:
    """Serves until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m services.agent.host")
    parser.add_argument("--host", default="127.0.0.1", help="name or address under which others reach this machine")
    parser.add_argument("--port", type=int, default=8710)
    parser.add_argument("--trainer-port", type=int, default=8711)
    parser.add_argument("--scorers-port", type=int, default=8712)
    parser.add_argument("--weights-port", type=int, default=8713)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the runs; resume states lie there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every job, on this machine")
    arguments = parser.parse_args()
    logs.setup("agent", "")
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        sys.exit(f"[agent] {TOKEN_VARIABLE} is not set: whoever may call this agent may run code here")
    arguments.data_dir.mkdir(parents=True, exist_ok=True)
    ports = {"trainer": arguments.trainer_port, "scorers": arguments.scorers_port, "weights": arguments.weights_port}
    try:
        overrides = [_with_model(override) for override in arguments.set]
    except NightshiftError as error:
        sys.exit(str(error))
    host = Host(Machine(arguments.data_dir.resolve(), arguments.host, ports, overrides), token)
    die_with_parent(signal.SIGTERM)
    ending = threading.Event()
    threading.Thread(target=_watch, args=(host, ending), name="idle", daemon=True).start()
    address = "127.0.0.1" if arguments.host in listen.LOOPBACK else "0.0.0.0"
    try:
        uvicorn.run(
            application(host, token),
            host=address,
            port=arguments.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
        )
    finally:
        ending.set()
        host.end()


def _with_model(override: str) -> str:
    """``model.path=…`` with a local folder, which is fetched or made where it is not there; others as they are."""
    key, _, value = override.partition("=")
    return f"{key}={resolve(value)}" if key.strip() == "model.path" else override


def _watch(host: Host, ending: threading.Event) -> None:
    while not ending.wait(5.0):
        try:
            host.end_idle()
        except NightshiftError as error:  # it is tried again
            _log.error("%s", error)


def _events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Whole lines of a run's events from a byte on, of the kinds that a runner elsewhere wants; and where they end."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return [], offset
    whole, _, _ = data.rpartition(b"\n")
    lines = [parse_line(line, path.name) for line in whole.split(b"\n") if line.strip()]
    end = offset + (len(whole) + 1 if whole else 0)
    return [line for line in lines if line["kind"] in ("role", "warning")], end


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _problem(status: int, message: str, fix: str = "") -> JSONResponse:
    return JSONResponse({"error": {"code": status, "message": message, "fix": fix}}, status)


if __name__ == "__main__":
    main()
