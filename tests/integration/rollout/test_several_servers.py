"""Real vLLM servers between the agent and the runner: weights by HTTP, servers that are killed and that hang."""

# ruff: noqa: ASYNC110, ASYNC210, ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nightshift.config.job import JobSpec
from nightshift.wire.events import EventLog, read_events
from nightshift.wire.restart_request import ask_restart, take_restart
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.answers import GenerateRequest
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.fleet import Fleet, Limits
from orchestrator.runner.health import PROBE_LIMITS
from orchestrator.runner.refill import Refill
from orchestrator.runner.server import Proof
from orchestrator.runner.trainer import Publication
from services.agent.rollout_servers import RolloutServers
from services.rollout.keeper import descendants
from services.rollout.launch import VllmServer
from services.trainer.publish import publish
from services.trainer.weight_server import WeightServer
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.integration

PROBES = [[1, 5, 6, 7, 8], [1, 9, 9, 9, 10, 11, 12]]
START_S = 240.0
TOKENS = 170


class Site:
    """Servers of one machine with the part of the agent that looks after them, and the runner's fleet on top."""

    def __init__(self, folder: Path, servers: int, stall_timeout_s: float) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir()
        self.models = {seed: build_tiny_model(folder / f"model-{seed}", seed=seed) for seed in (0, 1)}
        self.weights = WeightServer(self.store)
        self.events = EventLog(folder / "events.jsonl", "run")
        rollout = {"kv_cache_gib": 0.05, "max_num_seqs": 8, "max_response_length": 180, "start_timeout_s": START_S}
        spec = JobSpec.model_validate(
            {
                "name": "tiny",
                "model": {"path": str(self.models[0])},
                "data": {"train_files": ["unused.parquet"], "max_prompt_length": 64},
                "rewards": [{"function": "unused.py:reward"}],
                "rollout": rollout,
            }
        )
        cores = sorted(os.sched_getaffinity(0))
        self.servers = [
            VllmServer(
                spec,
                store=None,
                log_path=folder / "logs" / f"rollout-{at}.log",
                cores=[cores[at % len(cores)]],
                weights_url=self.weights.url,
                cache=folder / f"cache-{at}",
                name=f"rollout-{at}",
            )
            for at in range(servers)
        ]
        self.roles = RolloutServers(
            self.servers,
            self._report,
            lambda: None,
            stall_timeout_s=stall_timeout_s,
            asked=lambda entry: take_restart(folder, entry["name"], entry["incarnation"]),
        )
        self.fleet: Fleet | None = None
        self.stall_timeout_s = stall_timeout_s
        self._count = 0

    def _report(self, role: str, state: str, *, detail: str = "", fix: str = "", seconds: float | None = None) -> None:
        self.events.append("role", role=role, state=state, detail=detail, fix=fix, seconds=seconds)

    def addresses(self) -> list[EngineAddress]:
        source = {"url": self.weights.url, "token": self.weights.token}
        return [
            EngineAddress(e["name"], e["url"], e["token"], e["incarnation"], init_info=source, managed=True)
            for e in self.roles.entries()
        ]

    async def agent(self) -> None:
        while True:
            self.roles.tick(time.monotonic())
            await asyncio.sleep(0.2)

    def publish(self, seed: int) -> Publication:
        """Publishes a model's weights with their log-probs of the probe, as the trainer does."""
        written = publish(load_file(self.models[seed] / "model.safetensors"), self.store)
        model = AutoModelForCausalLM.from_pretrained(self.models[seed], dtype=torch.float32)
        values = [{"id": str(at), "logprobs": teacher_forced(model, ids)} for at, ids in enumerate(PROBES)]
        version, self._count = f"run/0/{self._count}", self._count + 1
        return Publication(version, "safetensors", written.update_info, written.digest, written.bytes, values, 1.0, 0.0)

    async def draw(self, count: int) -> list[Any]:
        assert self.fleet is not None
        requests = [
            GenerateRequest(f"r{at}", np.array([1, 5 + at, 6], np.int32), TOKENS, 1.0, (), seed=at, ignore_eos=True)
            for at in range(count)
        ]
        return list(await asyncio.gather(*(self.fleet.generate(request) for request in requests)))

    def states(self) -> list[tuple[str, str]]:
        return [(e["state"], e["detail"]) for e in read_events(self.folder / "events.jsonl") if e["kind"] == "role"]

    async def until(self, ready: Callable[[], Any], what: str, limit_s: float = START_S) -> None:
        deadline = time.monotonic() + limit_s
        while not ready():
            assert time.monotonic() < deadline, f"waited for {what}: {self.states()}"
            await asyncio.sleep(0.2)


@torch.no_grad()
def teacher_forced(model: Any, ids: list[int]) -> np.ndarray:
    logits = model(torch.tensor([ids])).logits[0, 1:-1]
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 2), torch.tensor(ids[2:])].numpy()


@asynccontextmanager
async def running(folder: Path, servers: int, stall_timeout_s: float = 60.0) -> AsyncIterator[Site]:
    """A site whose servers are ready and hold the weights of model 0."""
    site = Site(folder, servers, stall_timeout_s)
    site.weights.start()
    site.roles.begin(time.monotonic())
    agent = asyncio.create_task(site.agent())
    try:
        await site.until(lambda: site.roles.ready, "the servers")
        probe = [
            SequenceInput(id=str(at), prompt_ids=np.array(ids[:2], np.int32), response_ids=np.array(ids[2:], np.int32))
            for at, ids in enumerate(PROBES)
        ]
        site.fleet = Fleet(
            site.addresses(),
            events=site.events,
            refresh=site.addresses,
            proof=Proof(probe, PROBE_LIMITS["float32"]),
            limits=Limits(
                request_timeout_s=300, away_s=START_S, stall_timeout_s=stall_timeout_s, retries=0, flush_tokens=8
            ),
            refill=Refill(1),
            ask_restart=lambda address, cause: ask_restart(folder, address.name, address.incarnation, cause),
        )
        site.fleet.start()
        await site.fleet.publish(site.publish(0))
        yield site
    finally:
        agent.cancel()
        if site.fleet is not None:
            await site.fleet.close()
        await asyncio.to_thread(site.roles.stop)
        site.weights.stop()


async def test_two_servers_take_weights_by_http_and_one_that_is_killed_serves_again(tmp_path: Path) -> None:
    async with running(tmp_path, servers=2) as site:
        fleet = site.fleet
        assert fleet is not None
        for server in site.servers:
            environment = Path(f"/proc/{server.pid}/environ").read_bytes()
            assert b"NIGHTSHIFT_WEIGHT_STORE" not in environment
            assert str(site.store).encode() not in environment
        await refuse_what_is_not_published(site)
        await fleet.publish(site.publish(1))

        def held() -> list[str]:
            return [path.name for path in sorted(tmp_path.glob("cache-*/*.safetensors"))]

        # A push waits only a while for a server that takes longer than the others.
        await site.until(lambda: held() == ["2.safetensors"] * 2, "both to hold the weights")
        await site.until(lambda: all(server.health.usable for server in fleet.servers), "both to be usable")

        first = site.servers[0].incarnation
        drawing = asyncio.create_task(site.draw(12))
        await site.until(lambda: all(server.running for server in fleet.servers), "requests on both", 30)
        await asyncio.sleep(0.5)
        os.kill(site.servers[0].pid, signal.SIGKILL)
        answers = await drawing
        assert all(len(answer.response_ids) == TOKENS for answer in answers)
        assert {span.version for answer in answers for span in answer.versions} == {"run/0/1"}

        # The death may not have been noticed yet: it is another start that counts.
        def back() -> bool:
            usable = {server.address.incarnation for server in fleet.servers if server.health.usable}
            return len(usable) == 2 and site.servers[0].incarnation in usable - {first}

        await site.until(back, "the killed one to come back")
        again = await site.draw(8)
        assert {span.version for answer in again for span in answer.versions} == {"run/0/1"}
        assert await counted(site.servers[0], "request_success_total") > 0, "the one that came back takes requests"


async def counted(server: VllmServer, name: str) -> float:
    """Sum of a counter of this start of a server."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        text = (await http.get("/metrics")).text
    counts = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(map(float, counts))


async def until_drawn(server: VllmServer, tokens: int) -> None:
    """Waits until a server has drawn so many tokens more than now."""
    wanted = await counted(server, "generation_tokens_total") + tokens
    async with asyncio.timeout(60):
        while await counted(server, "generation_tokens_total") < wanted:
            await asyncio.sleep(0.01)


async def refuse_what_is_not_published(site: Site) -> None:
    """A file with one bit changed, and one that is cut short: each is refused by name, and the server goes on."""
    server = site.servers[0]
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60, trust_env=False) as http:
        whole = (site.store / "1.safetensors").read_bytes()
        described = site.publish(0).update_info  # another version of the same weights
        path = site.store / described["path"]
        for broken in (bytes([whole[-1] ^ 1]).join([whole[:-1], b""]), whole[:-100]):
            path.write_bytes(broken)
            source = {"url": site.weights.url, "token": site.weights.token}
            body = {"init_info": source, "update_info": {**described, "bytes": len(broken)}}
            answer = await http.post("/nightshift/v1/prefetch", json=body)
            assert answer.status_code == 422, answer.text
            assert f"/weights/{path.name} is corrupt" in answer.text
            assert (await http.post("/pause?mode=keep")).status_code == 200
            assert (await http.post("/start_weight_update")).status_code == 200
            answer = await http.post("/update_weights", json={"update_info": body["update_info"]})
            assert answer.status_code == 500
            with contextlib.suppress(httpx.TransportError):  # the server closes the connection after such an answer
                await http.post("/resume")
            await http.post("/resume")
        site._count -= 1
        path.unlink()
        log = (site.folder / "logs" / "rollout-0.log").read_text(errors="replace")
        assert f"/weights/{path.name} is corrupt" in log


async def test_a_server_that_is_stopped_and_not_dead_is_started_again(tmp_path: Path) -> None:
    """The engine alone: the health check stays open and no token comes. Then all processes: nothing answers."""
    async with running(tmp_path, servers=1, stall_timeout_s=8.0) as site:
        fleet = site.fleet
        assert fleet is not None
        for times, which in enumerate(("EngineCore", "all"), start=1):
            server, first = site.servers[0], site.servers[0].incarnation
            drawing = asyncio.create_task(site.draw(6))
            await site.until(lambda: fleet.running == 6, "running requests", 60)
            await until_drawn(server, 6 * 16)  # two parts of a response, one of which has arrived
            pids = descendants(server.pid)
            victims = [p for p in pids if which == "all" or which in Path(f"/proc/{p}/cmdline").read_text()]
            assert victims
            for pid in victims:
                os.kill(pid, signal.SIGSTOP)
            assert not drawing.done(), "the responses were drawn before the server was stopped"
            if which == "EngineCore":
                assert httpx.get(f"{server.url}/health", trust_env=False, timeout=30).status_code == 200
            answers = await drawing
            assert all(len(answer.response_ids) == TOKENS for answer in answers)
            assert site.servers[0].incarnation != first
            assert not any(Path(f"/proc/{pid}").exists() for pid in victims)
            hangs = [detail for state, detail in site.states() if state == "restarting" and "hangs" in detail]
            assert len(hangs) >= times, site.states()
            assert fleet.take_metrics()["rollout/kept_tokens"] > 0
            await site.until(lambda: site.roles.ready and fleet.servers[0].health.usable, "the server to be usable")
