"""The job service for tests: the real application, with a process that plays the jobs."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from orchestrator.api.app import make_app
from orchestrator.api.config import ServiceConfig
from orchestrator.api.service import Service
from orchestrator.store.access import Scope

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.fakes.job_process", "{folder}"]
REWARD = b"def score(response):\n    return float(len(response))\n"
ROWS = b'{"prompt": "one"}\n{"prompt": "two"}\n'


def digest(data: bytes) -> str:
    """The SHA-256 under which a file is uploaded."""
    return hashlib.sha256(data).hexdigest()


def job(
    name: str = "tiny", *, steps: int = 3, step_s: float = 0.01, fails: bool = False, **more: Any
) -> dict[str, Any]:
    """A job file whose files are the uploads REWARD and ROWS."""
    return {
        "name": name,
        "model": {"path": "builtin:smollm2-135m-instruct"},
        "data": {"train_files": [f"upload:{digest(ROWS)}/rows.jsonl"]},
        "rewards": [{"function": f"upload:{digest(REWARD)}/reward.py:score"}],
        "rollout": {"request_timeout_s": step_s},
        "algorithm": {"gamma": 0.1 if fails else 1.0},
        "trainer": {"total_steps": steps},
        **more,
    }


class Api:
    """A client of the application, without a socket.

    Attributes:
        service: its service.
    """

    def __init__(self, service: Service, http: httpx.AsyncClient) -> None:
        self.service = service
        self.http = http

    def token(self, *scopes: Scope, project: str | None = "default", **more: Any) -> dict[str, str]:
        """Headers of a new token."""
        _, text = self.service.access.create_token("t", scopes or [Scope.ADMIN], project, **more)
        return {"Authorization": f"Bearer {text}"}

    async def upload(self, headers: dict[str, str] | None = None) -> None:
        """Uploads what :func:`job` refers to."""
        for data in (REWARD, ROWS):
            response = await self.http.put(f"/v1/uploads/{digest(data)}", content=data, headers=headers)
            assert response.status_code in (200, 201), response.text

    async def submit(self, document: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Submits a job."""
        response = await self.http.post("/v1/jobs", json=document or job(), **more)
        assert response.status_code == 201, response.text
        made: dict[str, Any] = response.json()
        return made

    async def wait(self, job_id: str, *states: str, limit_s: float = 90.0) -> dict[str, Any]:
        """Waits for a job to be in one of the states."""
        deadline = time.monotonic() + limit_s
        while True:
            found: dict[str, Any] = (await self.http.get(f"/v1/jobs/{job_id}")).json()
            if found.get("state") in states:
                return found
            assert time.monotonic() < deadline, f"waited {limit_s} s for {states}: {found}"
            await asyncio.sleep(0.03)

    async def wait_step(self, job_id: str, step: int, limit_s: float = 90.0) -> None:
        """Waits for a job to have made so many steps."""
        deadline = time.monotonic() + limit_s
        while (await self.http.get(f"/v1/jobs/{job_id}")).json()["step"] < step:
            assert time.monotonic() < deadline, f"waited {limit_s} s for step {step}"
            await asyncio.sleep(0.03)


@asynccontextmanager
async def serve(folder: Path, *, drive: bool = True, **settings: Any) -> AsyncIterator[Api]:
    """The service on a folder; its token is an administrator's."""
    defaults: dict[str, Any] = {"command": COMMAND, "tick_s": 0.05, "lease_s": 3.0, "at_once": 2}
    config = ServiceConfig(folder, **{**defaults, **settings})
    service = Service(config)
    app = make_app(service, drive=drive)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    _, text = service.access.create_token("admin", [Scope.ADMIN])
    headers = {"Authorization": f"Bearer {text}"} if config.require_token else {}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers, timeout=60) as http,
    ):
        api = Api(service, http)
        await api.upload()
        yield api
