"""Rollout servers that a run is lent: they join and leave while it works."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from nightshift.wire.lease_fence import HEADER, LeaseFence
from nightshift.wire.lease_file import LeasedServer, read_released, write_leases
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.run import FakeRun

LONG = {"max_response_length": 40, "flush_tokens": 4, "fleet": "night"}
PLAN = [7 + at % 20 for at in range(40)]  # forty tokens, none of which ends a response


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.runner.watcher._LOOK_S", 0.05)


class LentRun(FakeRun):
    """A run whose servers are lent to it by the test, in place of the service."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, **{"token_s": 0.004, "rollout": LONG, **more})
        self.lent: dict[int, tuple[FakeEngine, float | None]] = {}
        for engine in self.engines:
            engine.script = lambda request: PLAN[40 - request.sampling["max_tokens"] :]

    def write_services(self) -> None:
        """The agent lists no server of its own."""
        super().write_services()
        path = self.run_dir / "services.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rollout": []}))

    def lend(self, engine: FakeEngine, lease: int) -> None:
        self.lent[lease] = (engine, None)
        self._tell()

    def ask_back(self, lease: int, drain_s: float = 30.0) -> None:
        self.lent[lease] = (self.lent[lease][0], time.time() + drain_s)
        self._tell()

    def end(self, lease: int) -> None:
        del self.lent[lease]
        self._tell()

    def _tell(self) -> None:
        leases = [
            LeasedServer(engine.name, engine.address["url"], lease, engine.token, until)
            for lease, (engine, until) in self.lent.items()
        ]
        write_leases(self.run_dir, leases)

    async def returned(self, lease: int) -> None:
        await self.until(lambda: lease in read_released(self.run_dir).leases, f"lease {lease} to be let go of", 60.0)


def running_there(engine: FakeEngine) -> int:
    return sum(not request.status and not request.disconnected for request in engine.samples)


async def test_a_run_waits_for_its_first_lease_longer_than_a_role_may_be_away(tmp_path: Path) -> None:
    async with LentRun(tmp_path, pipeline={"role_timeout_s": 0.5}) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: read_released(run.run_dir).wants, "the run to want servers", 60.0)
            await asyncio.sleep(1.5)
            assert not run.engine.requests, "nobody lent it the server yet"
            run.lend(run.engine, 7)
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=120) == 0, run.error()
        audit(run, steps=6, staleness=1)
        said = read_released(run.run_dir)
        assert not said.wants, "a run that has ended wants nothing"
        assert said.leases == {7}


async def test_a_run_that_is_never_lent_a_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.runner.fleet._LEASE_LOOK_S", 0.05)
    async with LentRun(tmp_path, rollout={**LONG, "fleet": {"name": "night", "max_wait_s": 1.0}}) as run:
        assert await run.run(limit_s=120) == 1
        assert "[rollout] fleet 'night' lent the job no server for" in run.error()
        assert "nightshift fleets" in run.error()


async def test_servers_come_and_go_and_none_is_used_before_or_after_its_lease(tmp_path: Path) -> None:
    async with LentRun(tmp_path, prompts=60, servers=2) as run:
        first, second = run.engines
        counted: list[int] = []

        async def watch(job: Job) -> None:
            run.lend(first, 1)
            await run.until(lambda: len(run.updates) >= 3, "updates with one server", 60.0)
            assert not second.requests
            run.lend(second, 2)
            await run.until(lambda: second.samples, "requests on the second", 60.0)
            run.ask_back(1)
            await run.returned(1)
            assert not running_there(first)
            counted.append(len(first.requests))
            run.end(1)
            done = len(run.updates)
            await run.until(lambda: len(run.updates) >= done + 4, "updates without it", 60.0)
            counted.append(len(first.requests))
            run.lend(first, 3)  # it missed updates, and another job may have had it
            await run.until(lambda: len(first.samples) and first.requests[-1].order > counted[0], "its return", 60.0)
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=180) == 0, run.error()
        audit(run, steps=30, staleness=1)
        assert balance(run) == {"issued": 60, "trained": 60}
        assert counted[0] == counted[1], "not a single request after it was let go of"
        later = [request.path.split("?")[0] for request in first.requests[counted[0] :]]
        assert "/finish_weight_update" in later[: later.index("/nightshift/v1/generate")]


async def test_what_does_not_end_in_time_goes_on_elsewhere_behind_its_prefix(tmp_path: Path) -> None:
    async with LentRun(tmp_path, prompts=24, servers=2, token_s=0.02) as run:
        first, second = run.engines

        async def watch(job: Job) -> None:
            run.lend(first, 1)
            run.lend(second, 2)
            await run.until(
                lambda: len(run.updates) >= 2 and any(r.sent >= 8 and not r.status for r in first.samples),
                "a part of a response",
                60.0,
            )
            run.ask_back(1, drain_s=0.0)
            await run.returned(1)
            run.end(1)
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=180) == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert any(request.disconnected for request in first.samples)
        assert sum(line["metrics"]["rollout/kept_tokens"] for line in run.metrics()) >= 8
        for sample in (sample for update in run.updates for sample in update.samples):
            assert sample.response_ids.tolist() == PLAN


async def test_a_run_that_lost_all_leases_publishes_and_waits(tmp_path: Path) -> None:
    """The last server is taken away while an update is made: the step ends, and the next one waits for a lease."""
    async with LentRun(tmp_path, prompts=12, pipeline={"role_timeout_s": 2.0}) as run:

        async def watch(job: Job) -> None:
            run.lend(run.engine, 1)
            for lease in (1, 2, 3):
                done = len(run.updates)
                await run.until(lambda done=done: len(run.updates) > done, "an update", 60.0)
                run.ask_back(lease, drain_s=0.0)
                await run.returned(lease)
                run.end(lease)
                await asyncio.sleep(2.5)
                run.lend(run.engine, lease + 1)
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=180) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}


async def test_a_lease_that_was_asked_back_before_it_was_seen_is_never_taken(tmp_path: Path) -> None:
    async with LentRun(tmp_path, servers=2) as run:
        first, second = run.engines
        run.lend(first, 1)
        run.lend(second, 2)
        run.ask_back(2)
        assert await run.run(limit_s=120) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert not second.requests
        assert 2 in read_released(run.run_dir).leases


async def test_a_lease_that_ended_without_a_word_is_broken_off_at_once(tmp_path: Path) -> None:
    """As when a deadline has passed, or the service gave the server away while the runner hung."""
    async with LentRun(tmp_path, prompts=24, servers=2, token_s=0.02) as run:
        first, second = run.engines

        async def watch(job: Job) -> None:
            run.lend(first, 1)
            run.lend(second, 2)
            await run.until(lambda: len(run.updates) >= 2 and running_there(first), "requests there", 60.0)
            run.end(1)
            await run.until(lambda: not running_there(first), "its requests to end", 60.0)
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=180) == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert any(request.disconnected for request in first.samples)


async def test_a_run_that_used_a_server_beyond_its_lease_trains_on_no_token_of_another_job(tmp_path: Path) -> None:
    """As after a deadline that passed while the runner hung: the server holds another job's weights by then."""
    async with LentRun(tmp_path, prompts=24, servers=2, token_s=0.02) as run:
        first, second = run.engines

        async def watch(job: Job) -> None:
            run.lend(first, 1)
            run.lend(second, 2)
            await run.until(
                lambda: len(run.updates) >= 2 and any(r.sent >= 4 and not r.status for r in first.samples),
                "a part of a response there",
                60.0,
            )
            first.weights, first.version = first.weights + 0.5, "other-20260101-000000-abcd/1/3"
            drawn = len(first.samples)
            await run.until(
                lambda: any("other-" in label for r in first.samples for label in r.labels), "tokens of the other", 60.0
            )
            await run.until(lambda: any("other-" in text for text in told(run)), "the run to notice", 60.0)
            run.end(1)
            assert drawn
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=180) == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        versions = {version for row in run.rollouts() for version in row["versions"]}
        assert all(version.startswith(f"{run.run_dir.name}/") for version in versions)


def told(run: FakeRun) -> list[str]:
    """What the run said of its servers."""
    return [str(event.get("detail") or event.get("message") or "") for event in run.events()]


async def test_a_job_that_comes_back_too_late_is_refused_by_the_server_itself(tmp_path: Path) -> None:
    """Its lease has ended, the server works for another job, and its own file of leases does not say so yet."""
    async with LentRun(tmp_path, prompts=24) as run:
        refused: list[int] = []

        async def watch(job: Job) -> None:
            run.lend(run.engine, 5)
            await run.until(lambda: len(run.updates) >= 2, "updates under the lease", 60.0)
            headers = {"Authorization": f"Bearer {run.engine.token}", HEADER: str(LeaseFence(0, 6))}
            async with httpx.AsyncClient(base_url=run.engine.address["url"], headers=headers) as other:
                assert (await other.post("/resume")).status_code == 200
            newer = next(r for r in run.engine.requests if r.headers.get(HEADER) == "0.6")

            def late() -> list[int]:
                mine = [r for r in run.engine.requests if r.headers.get(HEADER) == "0.5" and r.method == "POST"]
                return [r.status for r in mine if r.order > newer.order]

            await run.until(lambda: 409 in late(), "a refusal", 60.0)
            run.end(5)  # now the run learns of it
            await asyncio.sleep(0.3)
            refused.extend(late())
            run.lend(run.engine, 7)
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=180) == 0, run.error()
        assert refused
        assert set(refused) <= {409, 0}, "nothing of the older lease was taken"
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert any("is over: it works for lease 0.6 now" in str(event) for event in run.events())
