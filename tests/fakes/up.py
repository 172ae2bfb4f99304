"""The job service as a process of its own on loopback, with a process that plays the jobs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nightshift.client import Client
from tests.fakes.service import COMMAND, ROOT


class Up:
    """``nightshift up`` on a folder; leaving it ends the service and its jobs."""

    def __init__(self, folder: Path, *arguments: str, command: list[str] | None = COMMAND) -> None:
        self.folder = folder
        self._arguments = [*arguments, *(["--command", json.dumps(command)] if command else [])]
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "NIGHTSHIFT_DATA_DIR": str(folder)}
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self, limit_s: float = 60.0) -> Self:
        """Starts the service and waits until it listens."""
        arguments = ["--data-dir", str(self.folder), "--port", "0", "--json", *self._arguments]
        with (self.folder.parent / "up.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.api", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                cwd=self.folder.parent,
                text=True,
            )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        assert ready, "the service did not say that it listens"
        line = self.process.stdout.readline()
        assert line, (self.folder.parent / "up.log").read_text()
        self.url = json.loads(line)["url"]
        return self

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def client(self) -> Client:
        """A client with the administrator's token."""
        return Client(self.url, (self.folder / "admin-token").read_text().strip())

    def cli(self, *arguments: str, code: int = 0) -> str:
        """Runs a command against the service; its output."""
        done = subprocess.run(
            [sys.executable, "-m", "nightshift.cli.main", *arguments],
            env={**self.environment, "NIGHTSHIFT_URL": self.url},
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stdout + done.stderr

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait(30)
            if self.process.stdout is not None:
                self.process.stdout.close()
        for path in (self.folder / "runs").glob("*/process.json"):
            keeper = json.loads(path.read_text())
            if str(path.parent) in _command_line(keeper["pid"]):
                os.kill(keeper["pid"], signal.SIGTERM)

    def wait(self, client: Client, job_id: str, state: str, limit_s: float = 60.0) -> Any:
        """Waits for a job to be in a state."""
        deadline = time.monotonic() + limit_s
        while (job := client.get(job_id)).state != state:
            assert time.monotonic() < deadline, f"waited {limit_s} s for {state}: {job}"
            time.sleep(0.05)
        return job


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
