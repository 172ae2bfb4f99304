"""The agent with the real vLLM, Ray Serve and trainer, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import pytest

from nightshift.config.job import JobSpec
from nightshift.config.load import write_resolved
from nightshift.wire.events import read_events
from nightshift.wire.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from services.agent import leftovers
from services.rollout.keeper import descendants
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.integration

START_S = 200.0


class Agent:
    """An agent of a run of its own."""

    def __init__(self, folder: Path, model: Path, **sections) -> None:
        self.run_dir = folder / "run"
        (self.run_dir / "logs").mkdir(parents=True)
        (folder / "reward.py").write_text("def score(response):\n    return float(len(response))\n")
        job = {
            "name": "tiny",
            "model": {"path": str(model)},
            "data": {"train_files": ["unused.parquet"], "max_prompt_length": 64},
            "rewards": [{"function": f"{folder}/reward.py:score"}],
            "algorithm": {"kl_coef": 0.01},
            "rollout": {"max_response_length": 64, "kv_cache_gib": 0.05, "max_num_seqs": 8},
            "resources": {"weight_store": str(folder)},
            **sections,
        }
        write_resolved(JobSpec.model_validate(job), self.run_dir / "job.yaml")
        with (self.run_dir / "logs" / "agent.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.agent", "--run-dir", str(self.run_dir)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def roles(self) -> list[tuple[str, str]]:
        events = read_events(self.run_dir / "events.jsonl")
        return [(event["role"], event["state"]) for event in events if event["kind"] == "role"]

    def until(self, role: str, state: str, times: int = 1) -> None:
        deadline = time.monotonic() + START_S
        while self.roles().count((role, state)) < times:
            log = (self.run_dir / "logs" / "agent.log").read_text()[-2000:]
            assert self.process.poll() is None, f"ended with {self.process.poll()}: {self.roles()} {log}"
            assert time.monotonic() < deadline, f"waited for {role} {state}: {self.roles()} {log}"
            time.sleep(0.2)

    @property
    def services(self) -> dict:
        return json.loads((self.run_dir / "services.json").read_text())

    def kill(self) -> None:
        if self.process.poll() is None:
            pids = descendants(self.process.pid)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                for pid in pids:
                    if Path(f"/proc/{pid}").exists():
                        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agent(tmp_path):
    model = build_tiny_model(tmp_path / "model")
    started = []

    def start(**sections):
        started.append(Agent(tmp_path, model, **sections))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def listening_beyond_loopback(pids: list[int]) -> list[str]:
    """Local addresses, in hex, at which one of the processes listens and other machines could reach it."""
    inodes = set()
    for pid in pids:
        try:
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address = fields[1].partition(":")[0]
            local = address == "0100007F" or address.endswith(("0100007F", "01000000"))
            if fields[3] == "0A" and fields[9] in inodes and not local:
                found.append(fields[1])
    return found


def greet(services: dict) -> None:
    """Asks every role who it is."""
    rollout = services["rollout"][0]
    headers = {"Authorization": f"Bearer {rollout['token']}"}
    assert httpx.get(f"{rollout['url']}/weight_info", headers=headers, trust_env=False).status_code == 200
    for scorer in (*services["rewards"], services["reference"]):
        with grpc.insecure_channel(scorer["url"].removeprefix("grpc://")) as channel:
            stub = scorer_pb2_grpc.ScorerServiceStub(channel)
            request = scorer_pb2.DescribeRequest(context=common_pb2.Context())
            stub.Describe(request, timeout=30, metadata=(("application", scorer["application"]),))
    with grpc.insecure_channel(services["trainer"]["url"].removeprefix("grpc://")) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        request = trainer_pb2.DescribeTrainerRequest(context=common_pb2.Context())
        assert stub.Describe(request, timeout=30).ranks == 1


def kill_a_server(run: Agent) -> None:
    """Another one takes its place, with a token of its own."""
    before = run.services["rollout"][0]
    os.kill(before["pid"], signal.SIGKILL)
    run.until("rollout", "ready", times=2)
    deadline = time.monotonic() + 60
    while run.services["rollout"][0]["incarnation"] == before["incarnation"]:
        assert time.monotonic() < deadline, "the address was not replaced"
        time.sleep(0.1)
    assert run.services["rollout"][0]["token"] != before["token"]


def kill_a_rank(run: Agent) -> None:
    """The trainer is started again, and no process of the other one is left."""
    before = run.services["trainer"]
    pids = descendants(run.process.pid)
    ranks = [pid for pid in pids if b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ranks[0], signal.SIGKILL)
    run.until("trainer", "restarting")
    run.until("trainer", "ready", times=2)
    deadline = time.monotonic() + 60
    while run.services["trainer"] in (None, before):
        assert time.monotonic() < deadline, "no new address"
        time.sleep(0.1)
    assert run.services["trainer"]["incarnation"] == "2"
    with grpc.insecure_channel(run.services["trainer"]["url"].removeprefix("grpc://")) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        described = stub.Describe(
            trainer_pb2.DescribeTrainerRequest(context=common_pb2.Context(run_id="t")), timeout=30
        )
    assert described.policy_version == ""  # it holds the model's own weights until it is told what to load
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_all_roles_come_up_what_is_killed_comes_back_and_nothing_is_left(agent):
    shared = leftovers.snapshot()
    run = agent()
    run.until("agent", "ready")
    assert oct((run.run_dir / "services.json").stat().st_mode)[-3:] == "600"
    greet(run.services)
    pids = {run.process.pid, *descendants(run.process.pid)}
    assert listening_beyond_loopback(sorted(pids)) == []
    kill_a_rank(run)
    pids.update(descendants(run.process.pid))
    kill_a_server(run)
    greet(run.services)
    pids.update(descendants(run.process.pid))
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == 0
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert leftovers.left_behind(shared, leftovers.files_in_use()) == []
    assert sorted(path.name for path in run.run_dir.iterdir()) == ["events.jsonl", "job.yaml", "logs"]


def test_a_model_that_vllm_cannot_serve_is_one_sentence_and_leaves_nothing(agent):
    run = agent(rollout={"max_response_length": 64, "kv_cache_gib": 0.05, "max_model_len": 100_000})
    assert run.process.wait(START_S) == 1
    (failed,) = [e for e in read_events(run.run_dir / "events.jsonl") if e.get("state") == "failed"]
    assert failed["role"] == "rollout"
    assert "100000" in failed["detail"].replace(",", "").replace("_", "")
    assert not (run.run_dir / "services.json").exists()
