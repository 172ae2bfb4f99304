"""Many at once: submissions, requests beyond what is answered at one time, and readers beside a writer.

How fast it is stands in docs/figures.md (``tests/bench/bench_service.py``); here is what must hold at any speed.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import event, insert
from sqlalchemy.exc import OperationalError

from orchestrator.api import readers, routes_jobs
from orchestrator.api.__main__ import listen
from orchestrator.store.schema import audit
from orchestrator.store.state import StateStore
from tests.fakes.service import job, serve


async def test_jobs_that_are_submitted_at_once_are_queued_exactly_once(tmp_path: Path) -> None:
    """Each of 60 twice at the same time under one key, as a client does that lost its answer; and 20 without a key."""
    async with serve(tmp_path, drive=False) as api:
        keyed = [
            api.http.post("/v1/jobs", json=job(f"job-{at}"), headers={"Idempotency-Key": f"k{at}"})
            for at in range(60)
            for _ in range(2)
        ]
        answers = await asyncio.gather(*keyed, *(api.http.post("/v1/jobs", json=job("free")) for _ in range(20)))
        assert sorted(answer.status_code for answer in answers) == [200] * 60 + [201] * 80
        told = {answer.json()["id"] for answer in answers}
        found = (await api.http.get("/v1/jobs", params={"limit": 500})).json()["jobs"]
        assert len(found) == len({item["id"] for item in found}) == 80
        assert {item["id"] for item in found} == told
        assert {item["state"] for item in found} == {"queued"}
        assert len(list((tmp_path / "runs").iterdir())) == 80, "no folder of a second submission is left"


async def test_more_requests_than_are_answered_at_one_time_are_refused_and_lose_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False, max_requests=4) as api:
        made = await api.submit()

        answers = await asyncio.gather(*(api.http.get(f"/v1/jobs/{made['id']}") for _ in range(40)))
        codes = {answer.status_code for answer in answers}
        assert codes == {200, 503}
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"] == "5"
        assert "are being answered already" in refused.json()["detail"]
        assert (await api.http.get(f"/v1/jobs/{made['id']}")).status_code == 200, "none of them is counted any more"


async def test_a_ledger_is_read_while_its_run_writes(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        folder = tmp_path / "runs" / made["id"]
        store = StateStore(f"sqlite:///{folder / 'state.db'}")
        with store._write.begin():  # a runner in the middle of a transaction
            answer = await asyncio.wait_for(api.http.get(f"/v1/jobs/{made['id']}/ledger"), 30)
        assert (answer.status_code, answer.json()["balanced"]) == (200, True)
        store.close()


async def test_a_database_without_room_is_said_so(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        kept = await api.submit()
        engine = api.service.engine

        def no_room(connection: object, *_rest: object) -> None:
            connection.execute("PRAGMA max_page_count=1")  # type: ignore[attr-defined]

        engine.dispose()
        event.listen(engine, "connect", no_room)
        row = {"time": 0.0, "actor": "a" * 4000, "project": "", "action": "", "target": "", "detail": "{}"}

        def fill() -> None:
            for _ in range(200):
                with engine.begin() as connection:
                    connection.execute(insert(audit), row)

        with pytest.raises(OperationalError, match="disk is full"):
            fill()
        refused = [await api.http.post("/v1/jobs", json=job()) for _ in range(5)]
        assert {answer.status_code for answer in refused} <= {201, 503}
        assert refused[-1].json()["type"] == "urn:nightshift:problem:disk-full"
        event.remove(engine, "connect", no_room)
        engine.dispose()
        known = {item["id"] for item in (await api.http.get("/v1/jobs")).json()["jobs"]}
        assert kept["id"] in known
        assert {path.name for path in (tmp_path / "runs").iterdir()} == known, "a refused submission leaves no folder"
        assert (await api.http.post("/v1/jobs", json=job())).status_code == 201


@pytest.mark.parametrize(("offset", "limit"), [(0, 50), (0, 3), (2, 5), (5, 1), (6, 4), (40, 5)])
def test_the_usual_page_of_samples_is_the_one_of_the_whole_table(tmp_path: Path, offset: int, limit: int) -> None:
    for step in range(1, 5):
        rows = [{"step": step, "sample_id": f"g{step}.{at}", "group_id": "g", "reward": float(at)} for at in (2, 0, 1)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"step_{step:06d}.parquet")
    total, page = readers.rollouts(tmp_path, readers.RolloutQuery(offset=offset, limit=limit))
    # A filter that all fit takes the other way, over the whole table.
    whole = readers.rollouts(tmp_path, readers.RolloutQuery(offset=offset, limit=limit, group_id="g"))
    assert (total, page) == whole
    assert total == 12


async def test_answers_are_sent_at_once(tmp_path: Path) -> None:
    """A head and a body in two pieces, the second of which would else wait for the client's acknowledgement."""
    found: list[int] = []

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listening = listen("127.0.0.1", 0)
    async with await asyncio.start_server(answer, sock=listening):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        await reader.read()
        writer.close()
    assert found == [1]


async def test_few_plans_are_made_at_one_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a process; a hundred clients that plan at once must not start a hundred."""
    running, most = 0, 0

    async def slow(_job: Path, _folder: str) -> dict[str, Any]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.02)
        running -= 1
        return {}

    monkeypatch.setattr(routes_jobs, "_ask_plan", slow)
    async with serve(tmp_path, drive=False, max_plans=3) as api:
        made = await api.submit()
        asked = [api.http.post("/v1/plan", json=job()) for _ in range(10)]
        asked += [api.http.get(f"/v1/jobs/{made['id']}/plan") for _ in range(10)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert most == 3
