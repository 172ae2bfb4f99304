"""The agent as a whole, with fake parts: start, failures, restarts, the end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from nightshift.wire.events import read_events
from services.rollout.keeper import descendants

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = Path(__file__).with_name("fake_agent.py")
SECONDS = 60.0


class Agent:
    def __init__(self, folder, scenario, roles="", **sections):
        self.run_dir = folder / "run-1"
        self.run_dir.mkdir()
        self.store = folder / "shm" / "nightshift-run-1"
        dead = self.store.parent / "nightshift-dead"
        dead.mkdir(parents=True)
        (dead / ".owner").write_text(f"1 0 {Path('/proc/self/ns/pid').readlink()}")
        job = {
            "name": "t",
            "model": {"path": "/no/model"},
            "data": {"train_files": ["a"]},
            "rewards": [{"function": "r.py:f"}],
            "resources": {"weight_store": str(self.store.parent)},
            **sections,
        }
        if scenario != "no job":
            (self.run_dir / "job.yaml").write_text(yaml.safe_dump(job))
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(self.run_dir), scenario, *filter(None, [roles])],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def events(self, role=None):
        found = [e for e in read_events(self.run_dir / "events.jsonl") if e["kind"] == "role"]
        return [(e["role"], e["state"]) for e in found if role in (None, e["role"])]

    def failure(self):
        found = read_events(self.run_dir / "events.jsonl")
        return next((e["role"], e["detail"], e["fix"]) for e in found if e.get("state") == "failed")

    def until(self, ready, what):
        deadline = time.monotonic() + SECONDS
        while not (value := ready()):
            assert time.monotonic() < deadline, f"waited for {what}; events: {self.events()}"
            assert self.process.poll() is None, f"ended while waiting for {what}: {self.process.stderr.read()}"
            time.sleep(0.02)
        return value

    def until_event(self, role, state):
        self.until(lambda: (role, state) in self.events(), f"{role} {state}")

    @property
    def services(self):
        return json.loads((self.run_dir / "services.json").read_text())

    def wait(self):
        return self.process.wait(SECONDS)

    def nothing_left(self, pids):
        assert not self.store.exists()
        assert not (self.run_dir / "services.json").exists()
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.fixture
def agent(tmp_path):
    started = []

    def start(scenario="", roles="", **sections):
        started.append(Agent(tmp_path, scenario, roles, **sections))
        return started[-1]

    yield start
    for one in started:
        pids = descendants(one.process.pid)
        one.process.kill()
        one.process.wait()
        for pid in pids:
            os.kill(pid, signal.SIGKILL) if Path(f"/proc/{pid}").exists() else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_all_roles_writes_their_addresses_and_ends_in_order(agent, number):
    run = agent()
    run.until_event("agent", "ready")
    assert oct((run.run_dir / "services.json").stat().st_mode)[-3:] == "600"
    services = run.services
    assert services["rollout"][0]["init_info"] == {"root": str(run.store)}
    assert services["rewards"][0]["application"] == "reward-f"
    assert services["trainer"] == {"url": "grpc://trainer", "incarnation": "1"}
    assert services["reference"] is services["critic"] is None
    assert services["metrics"] == ["127.0.0.1:7"]
    assert oct(run.store.stat().st_mode)[-3:] == "700"
    pids = descendants(run.process.pid)
    assert len(pids) == 2
    run.process.send_signal(number)
    assert run.wait() == 0
    assert run.nothing_left(pids)
    order = (run.run_dir / "order").read_text().split("\n")
    assert order == ["store exists: True", "ray started", "trainer stopped", "scorers stopped", "ray stopped", ""]
    for role in ("rollout", "reward", "trainer"):
        assert run.events(role) == [(role, "starting"), (role, "ready")]
    assert run.events("agent") == [("agent", state) for state in ("starting", "ready", "stopping", "stopped")]


def test_several_servers_with_weights_by_http(agent):
    run = agent(rollout={"servers": 2, "weight_transfer": "http"})
    run.until_event("agent", "ready")
    source = {"url": "http://trainer/weights", "token": "files"}
    first, second = run.services["rollout"]
    assert [first["name"], second["name"]] == ["rollout-0", "rollout-1"]
    assert first["init_info"] == second["init_info"] == source
    (run.run_dir / "restart-rollout-1.json").write_text(json.dumps({"incarnation": "1", "cause": "drew no token"}))
    run.until(lambda: run.services["rollout"][1]["incarnation"] == "2", "another start of the second server")
    assert run.services["rollout"][0]["incarnation"] == "1"
    assert not (run.run_dir / "restart-rollout-1.json").exists()
    hung = [e["detail"] for e in read_events(run.run_dir / "events.jsonl") if e.get("state") == "restarting"]
    assert hung == ["vLLM server rollout-1 hangs: drew no token"]
    pids = descendants(run.process.pid)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert run.nothing_left(pids)
    order = (run.run_dir / "order").read_text().split("\n")
    assert order[:4] == ["weights on 127.0.0.1:0", "weights served", *["weights from http://trainer/weights"] * 2]
    assert order[-2:] == ["weights stopped", ""]


@pytest.mark.parametrize(
    ("scenario", "code", "role", "detail"),
    [
        ("no job", 2, "job", "cannot read"),
        ("port taken", 2, "scorers", "port 1 is taken"),
        ("bad reward", 2, "reward", "reward.py has no function 'f'"),
        ("trainer fails", 1, "trainer", "out of memory"),
        ("rollout fails", 1, "rollout", "ValueError: no such head size"),
        ("bug", 1, "trainer", "KeyError: 'odd'"),
    ],
)
def test_a_failed_start_names_the_role_and_leaves_nothing(agent, scenario, code, role, detail):
    run = agent(scenario)
    assert run.wait() == code
    found = run.failure()
    assert found[0] == role
    assert detail in found[1]
    assert run.nothing_left([])


@pytest.mark.parametrize("scenario", ["slow ray", "stuck deploy", "rollout never ready"])
def test_a_signal_during_the_start_ends_it_at_once(agent, scenario):
    run = agent(scenario)
    role = {"slow ray": "rollout", "stuck deploy": "reward", "rollout never ready": "trainer"}[scenario]
    run.until_event(role, "starting")
    time.sleep(0.3)
    pids = descendants(run.process.pid)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert "failed" not in [state for _, state in run.events()]
    assert run.nothing_left(pids)


def test_a_dead_server_is_started_again_under_a_new_incarnation(agent):
    run = agent()
    run.until_event("agent", "ready")
    os.kill(run.services["rollout"][0]["pid"], signal.SIGKILL)
    run.until_event("rollout", "restarting")
    run.until(lambda: run.services["rollout"][0]["incarnation"] == "2", "a second incarnation")
    assert run.events("rollout")[1:] == [("rollout", s) for s in ("ready", "restarting", "ready")]


def test_a_server_that_keeps_dying_fails_the_run(agent):
    run = agent()
    run.until_event("agent", "ready")
    for incarnation in "123":
        run.until(lambda n=incarnation: run.services["rollout"][0]["incarnation"] == n, f"incarnation {incarnation}")
        os.kill(run.services["rollout"][0]["pid"], signal.SIGKILL)
    assert run.wait() == 1
    assert run.failure()[:2] == (
        "rollout",
        "the vLLM server ended 3 times within 20 s of its start, last so: ended by signal 9",
    )
    assert run.nothing_left([])


def test_a_dead_trainer_is_started_again_and_one_that_keeps_dying_fails_the_run(agent):
    run = agent()
    run.until_event("agent", "ready")
    for incarnation in "123":
        run.until(
            lambda n=incarnation: (run.services["trainer"] or {}).get("incarnation") == n, f"number {incarnation}"
        )
        (trainer,) = set(descendants(run.process.pid)) - {run.services["rollout"][0]["pid"]}
        os.kill(trainer, signal.SIGKILL)
    assert run.wait() == 1
    assert run.failure()[:2] == ("trainer", "it ended 3 times within 20 s of its start, last so: rank 0 died")
    assert run.events("trainer")[1:4] == [("trainer", state) for state in ("ready", "restarting", "ready")]
    assert run.nothing_left([])


def test_a_replaced_scorer_is_told_and_a_lost_one_fails_the_run(agent):
    run = agent()
    run.until_event("agent", "ready")
    (run.run_dir / "scorer_state").write_text('["restarting", "replica died"]')
    run.until_event("reward", "restarting")
    (run.run_dir / "scorer_state").write_text('["failed", "gone"]')
    assert run.wait() == 1
    assert run.failure()[:2] == ("reward", "reward-f is gone from Serve: gone")


def test_the_end_of_ray_fails_the_run(agent):
    run = agent()
    run.until_event("agent", "ready")
    (run.run_dir / "ray_dead").touch()
    assert run.wait() == 1
    assert run.failure()[:2] == ("agent", "Ray's process raylet has ended")
    assert run.nothing_left([])


def test_the_store_of_an_agent_that_was_killed_goes_with_the_next_start(agent):
    run = agent()
    dead = run.store.parent / "nightshift-dead"
    run.until_event("agent", "ready")
    assert not dead.exists()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0


def test_a_part_that_cannot_be_ended_does_not_keep_the_rest_alive(agent):
    run = agent("bug at the end")
    run.until_event("agent", "ready")
    pids = descendants(run.process.pid)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert run.nothing_left(pids)


def test_the_agent_ends_when_its_parent_is_killed(agent, tmp_path):
    run = agent("")
    run.until_event("agent", "ready")
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    code = "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); time.sleep(600)"
    (run.run_dir / "events.jsonl").unlink()
    command = [sys.executable, "-c", code, sys.executable, str(SCRIPT), str(run.run_dir), ""]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + SECONDS
    while ("agent", "ready") not in run.events():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [child, *descendants(child)]
    parent.kill()
    parent.wait()
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not run.store.exists()


def test_a_job_on_preference_pairs_starts_no_server(agent):
    run = agent(algorithm={"policy_loss": "dpo"})
    run.until_event("agent", "ready")
    assert run.services["rollout"] == []
    assert run.services["trainer"]["url"] == "grpc://trainer"
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert run.events("rollout") == []
    assert (run.run_dir / "order").read_text().split("\n")[0] == "ray started"


def order_of(run):
    path = run.run_dir / "order"
    return path.read_text().split() if path.exists() else []


def test_a_job_of_a_fleet_starts_no_server_and_says_where_its_weights_are(agent):
    run = agent(rollout={"fleet": "night"}, resources={"device": "cpu"})
    run.until_event("agent", "ready")
    services = run.services
    assert services["rollout"] == []
    assert services["lent"]["weight_backend"] == "safetensors"
    assert set(services["lent"]["init_info"]) == {"url", "token"}
    assert ("rollout", "starting") not in run.events()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0


def test_an_agent_of_scorers_alone_starts_nothing_else(agent):
    run = agent(roles="scorers")
    run.until_event("agent", "ready")
    services = run.services
    assert services["trainer"] is None
    assert services["rollout"] == []
    assert [reward["name"] for reward in services["rewards"]] == ["f"]
    assert not run.store.exists()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert " ".join(order_of(run)) == "ray started scorers stopped ray stopped"


def test_a_job_whose_scorers_are_elsewhere_needs_no_ray_for_them(agent):
    rewards = [{"type": "grpc", "name": "mine", "url": "grpc://scorer:9000"}]
    reference = {"reference": {"model": "grpc://scorer:9000"}}
    run = agent(roles="scorers", rewards=rewards, scorers=reference, algorithm={"kl_coef": 0.1})
    run.until_event("agent", "ready")
    services = run.services
    assert services["rewards"] == [{"name": "mine", "url": "grpc://scorer:9000", "application": "reward-mine"}]
    assert services["reference"] == {"url": "grpc://scorer:9000", "application": "reference"}
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert order_of(run) == []


def test_a_job_whose_agent_has_no_token_is_refused_before_anything_starts(agent, monkeypatch):
    monkeypatch.delenv("NIGHTSHIFT_AGENT_TOKEN", raising=False)
    agents = {"trainer": "http://trainer:1", "scorers": "http://trainer:1"}
    run = agent(rollout={"url": "http://a:1"}, resources={"agents": agents})
    assert run.wait() == 2
    role, detail, _ = run.failure()
    assert role == "agent"
    assert "NIGHTSHIFT_AGENT_TOKEN" in detail
    assert order_of(run) == []
