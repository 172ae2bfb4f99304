"""Requests that wait for a server: given up at any moment, they leave nothing behind that others wait for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from nightshift.wire.errors import RoleTimeoutError
from nightshift.wire.events import EventLog, read_events
from orchestrator.runner import watcher
from orchestrator.runner.answers import GenerateRequest
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.fleet import Fleet, Limits
from orchestrator.runner.health import PROBE_LIMITS
from orchestrator.runner.server import Proof


def asked(name: str) -> GenerateRequest:
    return GenerateRequest(name, np.array([1], np.int32), 4, 1.0, ())


async def test_requests_that_are_cancelled_twice_keep_no_lock(tmp_path: Path) -> None:
    fleet = Fleet(
        [],
        events=EventLog(tmp_path / "events.jsonl", "run"),
        refresh=lambda: [],
        proof=Proof((), PROBE_LIMITS["float32"]),
        limits=Limits(request_timeout_s=1.0, away_s=30.0),
    )
    waiting = [asyncio.create_task(fleet.generate(asked(f"w{at}"))) for at in range(3)]
    await asyncio.sleep(0.01)
    async with fleet._changed:  # somebody tells of a change while they are given up
        for _ in range(2):
            for task in waiting:
                task.cancel()
            await asyncio.sleep(0.01)
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*waiting, return_exceptions=True))
    fleet._limits = Limits(request_timeout_s=1.0, away_s=0.05)
    async with asyncio.timeout(30):
        with pytest.raises(RoleTimeoutError, match="none is listed"):
            await fleet.generate(asked("last"))


async def test_a_look_at_the_servers_that_fails_is_told_and_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without further looks, a run would keep servers that it was asked to give back."""
    monkeypatch.setattr(watcher, "_LOOK_S", 0.01)
    failures: list[BaseException] = [OSError("no descriptor is left"), RuntimeError("unforeseen"), KeyError("url")]
    looked = asyncio.Event()
    address = EngineAddress("r0", "http://127.0.0.1:9", token="", incarnation="1")

    def refresh() -> list[EngineAddress]:
        if failures:
            raise failures.pop(0)
        looked.set()
        return [address]

    log = EventLog(tmp_path / "events.jsonl", "run")
    fleet = Fleet(
        [],
        events=log,
        refresh=refresh,
        proof=Proof((), PROBE_LIMITS["float32"]),
        limits=Limits(request_timeout_s=1.0, away_s=30.0),
    )
    fleet.start()
    async with asyncio.timeout(30):
        await looked.wait()
    assert [server.name for server in fleet.servers] == ["r0"]
    await fleet.close()
    told = " ".join(event["message"] for event in read_events(log.path) if event["kind"] == "warning")
    assert all(text in told for text in ("no descriptor is left", "RuntimeError: unforeseen", "KeyError"))
