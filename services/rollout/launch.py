"""Starts, watches and ends one vLLM server on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from nightshift.config.job import JobSpec
from nightshift.gpu import Device
from nightshift.wire import codec
from nightshift.wire.errors import BadInputError, RoleError, RoleTimeoutError, WireError
from nightshift.wire.frames import FrameReader
from nightshift.wire.request_log import log_path as request_log_path
from nightshift.wire.rollout import ROUTE
from services.rollout import keeper
from services.rollout.command import default_backend, server_command
from services.rollout.compat import check_version, installed_version
from services.rollout.diagnosis import diagnose
from services.rollout.request_log import LOG_VARIABLE, NAME_VARIABLE
from services.rollout.route import INCARNATION_VARIABLE

_KEEPER = Path(__file__).with_name("keeper.py")
#: Below the range from which the kernel hands out ports to clients, so that nobody else takes one between the choice
#: and the server's bind.
_PORT_RANGE = range(20000, 32000)
_LOG_TAIL = 64 << 10
_STOP_GRACE_S = 15.0
#: Longest time for one health check.
_HEALTH_S = 3.0


def free_port() -> int:
    """A port on loopback that nothing listens on.

    Raises:
        RoleError: none was found.
    """
    for port in random.SystemRandom().sample(_PORT_RANGE, 200):
        if port_is_free(port):
            return port
    raise RoleError("no free port between 20000 and 32000 on 127.0.0.1", role="rollout", fix="Free some ports")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def max_positions(model: Path) -> int | None:
    """Longest context that a model's config.json names; None where it names none.

    Raises:
        BadInputError: there is no readable config.json.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"model folder {str(model)!r} has no readable config.json ({error})",
            role="rollout",
            fix="Set model.path to a model in HF format",
        ) from error
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


#: Seconds for which a connection may be idle: with vLLM's 5 s, those of a whole batch would be made anew for the next.
KEEP_ALIVE_S = "60"


class VllmServer:
    """A vLLM server in a process group of its own.

    :meth:`spawn` must be called from a thread that lives as long as the server should: the kernel ends the server when
    that thread ends. Each start has a new token and a new incarnation id.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        store: Path | None,
        log_path: Path,
        device: Device = "cpu",
        cores: Sequence[int] = (),
        gpu: int | None = None,
        port: int = 0,
        weight_backend: str | None = None,
        weights_url: str | None = None,
        cache: Path | None = None,
        otlp: str | None = None,
        name: str = "rollout-0",
    ) -> None:
        """Prepares a server for a job whose ``model.path`` is a local folder.

        Args:
            store: folder of the published weights; None: it takes none from a folder.
            log_path: file to which stdout and stderr of the server are appended.
            cores: CPU cores of all its processes (CPU only); empty: all.
            gpu: its CUDA device, as this process counts them; None: the first one.
            port: 0: a free one, chosen anew at each start.
            weights_url: weight server that it may fetch from; None: none.
            cache: its own folder for fetched weight files; None: one below the folder for temporary files.

        Raises:
            BadInputError: there is no model in the folder.
        """
        self.name = name
        self.weight_backend = weight_backend or default_backend(device)
        self.port = 0
        self.token = ""
        self.incarnation = ""
        self._spec = spec
        self._store = store
        self._log_path = log_path
        self._log_start = 0
        self._device = device
        self._cores = list(cores) if device == "cpu" else []
        self._gpu = gpu
        self._wanted_port = port
        self._otlp = otlp
        self._weights_url = weights_url
        self._cache = cache
        self._max_positions = max_positions(Path(spec.model.path))
        self._process: subprocess.Popen[bytes] | None = None
        self._dead = False

    @property
    def url(self) -> str:
        """Address of the running server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process that all others of the server belong to, and leader of their group; 0 before the first start."""
        return self._process.pid if self._process else 0

    def entry(self) -> dict[str, Any]:
        """The server as ``services.json`` lists it."""
        return {
            "name": self.name,
            "url": self.url,
            "token": self.token,
            "incarnation": self.incarnation,
            "weight_backend": self.weight_backend,
            "pid": self.pid,
        }

    def check_port(self) -> None:
        """Checks that the wanted port can be had.

        Raises:
            BadInputError: something else listens there.
        """
        if self._wanted_port and not port_is_free(self._wanted_port):
            raise BadInputError(
                f"port {self._wanted_port} is taken",
                role="rollout",
                fix="Set resources.ports.rollout to a free port, or to 0 for any free one",
            )

    def spawn(self) -> None:
        """Starts the processes and returns at once.

        Raises:
            BadInputError: the port is taken, or the installed vLLM is not one that is known to work.
        """
        check_version(installed_version())
        self.check_port()
        self.port = self._wanted_port or free_port()
        self.token = secrets.token_urlsafe(32)
        self.incarnation = secrets.token_hex(8)
        self._dead = False
        command = server_command(
            self._spec,
            port=self.port,
            token=self.token,
            store=self._store,
            device=self._device,
            cores=self._cores,
            gpu=self._gpu,
            weight_backend=self.weight_backend,
            weights_url=self._weights_url,
            cache=self._cache,
            otlp=self._otlp,
            max_positions=self._max_positions,
            base_env=os.environ,
        )
        parent = [sys.executable, str(_KEEPER), "--parent", str(os.getpid()), "--grace", str(_STOP_GRACE_S - 3)]
        if self._cores:
            parent += ["--cores", ",".join(str(core) for core in self._cores)]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*parent, "--", *command.argv],
                env={
                    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": KEEP_ALIVE_S,
                    **command.env,
                    INCARNATION_VARIABLE: self.incarnation,
                    NAME_VARIABLE: self.name,
                    LOG_VARIABLE: str(request_log_path(self._log_path.parent, self.name)),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._log_path.parent,
                start_new_session=True,
            )

    def wait_ready(self, cancelled: threading.Event | None = None) -> float:
        """Waits until the server has answered a request with log-probs; returns the seconds since the call.

        Args:
            cancelled: ends the wait early; then the server is not ready.

        Raises:
            RoleError: it ended, or lacks what is needed of it; the message says why.
            RoleTimeoutError: not ready after ``rollout.start_timeout_s``.
        """
        began = time.monotonic()
        deadline = began + self._spec.rollout.start_timeout_s
        with httpx.Client(base_url=self.url, trust_env=False, timeout=5.0) as client:
            while not self._answers(client):
                if not self.alive():
                    raise self.failure()
                if time.monotonic() > deadline:
                    raise self._late()
                if cancelled is not None and cancelled.wait(0.25):
                    raise RoleError(f"{self.name}: start was cancelled", role="rollout")
                if cancelled is None:
                    time.sleep(0.25)
            self._warm_up(client, max(5.0, deadline - time.monotonic()))
        return time.monotonic() - began

    def start(self) -> float:
        """Starts the server and waits until it is ready; on failure nothing of it is left. See :meth:`wait_ready`."""
        self.spawn()
        try:
            return self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether the server's processes run, and its engine was not dead when :meth:`answers` was last called."""
        return self._process is not None and self._process.poll() is None and not self._dead

    def answers(self) -> bool:
        """Asks the health check, for a few seconds at most: whether there was an answer of any kind.

        An API server whose engine is gone says so, and then ends by itself, but not while a request that the engine
        will never answer is still open. One that does not answer at all may only be busy: that is no sign of death.
        """
        try:
            # Plain HTTP: without ``verify`` the certificates of the system would be read anew at each question.
            answer = httpx.get(f"{self.url}/health", timeout=_HEALTH_S, trust_env=False, verify=False)
            self._dead = answer.status_code == 503
        except httpx.HTTPError:
            return False
        return True

    def failure(self) -> RoleError:
        """Why a server that is not alive ended."""
        code = self._process.poll() if self._process else None
        if code is None and self._dead:
            message = f"vLLM server {self.name} lost its engine process"
            return RoleError(message, role="rollout", fix=f"its log: {self._log_path}")
        cause, fix = diagnose(self._log(), code, self.port)
        return RoleError(f"vLLM server {self.name} ended: {cause}", role="rollout", fix=f"{fix} ({self._log_path})")

    def stop(self) -> None:
        """Ends all processes of the server: SIGTERM, after a grace SIGKILL. Harmless where there is none."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_GRACE_S)
        # What a killed keeper left behind is still in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)

    def kill(self) -> None:
        """Ends all processes of the server at once, also those that are stopped and hear no other signal."""
        if self._process is not None and self._process.poll() is None:
            keeper.send([*keeper.descendants(self._process.pid), self._process.pid], signal.SIGKILL)

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _warm_up(self, client: httpx.Client, timeout_s: float) -> None:
        """Sends one request as the orchestrator will: what is missing or slow the first time shows here."""
        body = codec.pack({"request_id": "warm-up", "token_ids": [1, 1], "max_tokens": 2, "ignore_eos": True})
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            answer = client.post(ROUTE, content=body, headers=headers, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise self._late() from error
        except httpx.HTTPError as error:
            raise (RoleError(f"{self.name} broke off its first request: {error}", role="rollout")) from error
        try:
            frames = FrameReader().feed(answer.content) if answer.status_code == 200 else []
        except WireError:
            frames = []
        if not frames or frames[-1].finish_reason != "length" or len(frames[-1].ids) != 2:
            raise RoleError(
                f"vLLM server {self.name} answered its first request with {answer.status_code}: {answer.text[:300]}",
                role="rollout",
                fix=f"See {self._log_path}; install the vLLM version of the lock file",
            )

    def _late(self) -> RoleTimeoutError:
        seconds = self._spec.rollout.start_timeout_s
        return RoleTimeoutError(
            f"vLLM server {self.name} was not ready within {seconds:g} s",
            role="rollout",
            fix=f"Raise rollout.start_timeout_s, or see {self._log_path}",
        )

    def _log(self) -> str:
        """The end of what this start of the server has written."""
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _LOG_TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""
