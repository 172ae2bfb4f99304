"""Roles that an agent on another host starts: asked for over HTTP, watched, given up, and their files fetched."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from nightshift.config.job import JobSpec
from nightshift.config.load import read_resolved
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError
from nightshift.wire.events import EventLog, read_events
from orchestrator.runner.checkpoints import Checkpoints
from orchestrator.runner.services import FilesAddress
from orchestrator.runner.trainer_files import TrainerFiles
from services.agent.host import Host, Machine, application
from services.agent.remote import TOKEN_VARIABLE, RemoteAgent, request_of

TOKEN = "of-the-agents"
SECONDS = 60.0
#: An agent that brings up its roles at once, says so, and ends when it is told to; with a file "fail" it fails.
AGENT = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
def say(**fields):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "kind": "role", "run_id": folder.name, **fields}) + "\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
say(role="trainer", state="starting", detail="", fix="", seconds=None)
if (folder.parent.parent / "fail").exists():
    say(role="trainer", state="failed", detail="rank 0 ran out of memory", fix="Take fewer", seconds=None)
    sys.exit(2)
url = "grpc://" + os.environ["NIGHTSHIFT_HOST"] + ":1"
services = {"rollout": [], "rewards": [{"name": "f", "url": url, "application": "reward-f"}],
    "reference": {"url": "http://elsewhere:1", "application": "reference"}, "teacher": None, "critic": None,
    "trainer": {"url": url, "incarnation": "1"}, "weights": {"url": "http://w/weights", "token": "w"}}
(folder / "environment").write_text(json.dumps({"token": os.environ.get("NIGHTSHIFT_RUN_TOKEN"),
    "agent": os.environ.get("NIGHTSHIFT_AGENT_TOKEN"), "arguments": sys.argv[1:]}))
(folder / "services.json").write_text(json.dumps(services))
say(role="trainer", state="ready", detail="", fix="", seconds=1.5)
while True:
    time.sleep(0.1)
"""


@dataclass
class Served:
    """A host behind a port."""

    host: Host
    url: str
    data: Path

    def get(self, path: str, token: str = TOKEN, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {token}", **headers}, trust_env=False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    data = tmp_path / "data"
    data.mkdir()
    machine = Machine(data, "127.0.0.1", {"trainer": 1, "scorers": 2, "weights": 3}, ["model.path=/there/model"])
    host = Host(machine, TOKEN, [sys.executable, str(agent)])
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(host, TOKEN), log_level="warning", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(host, f"http://127.0.0.1:{listener.getsockname()[1]}", data)
    finally:
        host.end()
        server.should_exit = server.force_exit = True
        thread.join(SECONDS)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "run-1"
    (folder / "checkpoints").mkdir(parents=True)
    return folder


def spec_of(run_dir: Path, url: str) -> JobSpec:
    (run_dir.parent / "reward.py").write_text("def f(response): return 1.0\n")
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"path": "/here/model"},
            "data": {"train_files": ["/here/train.parquet"]},
            "rewards": [{"function": f"{run_dir.parent / 'reward.py'}:f"}],
            "rollout": {"url": "http://127.0.0.1:1"},
            "resources": {"agents": {"trainer": url, "scorers": url}},
        }
    )


def remote_of(served: Served, run_dir: Path, away_s: float | None = None) -> tuple[RemoteAgent, EventLog]:
    events = EventLog(run_dir / "events.jsonl", run_dir.name)
    remote = RemoteAgent(
        served.url,
        frozenset({"trainer", "scorers"}),
        spec_of(run_dir, served.url),
        run_dir,
        "http://127.0.0.1:4317",
        events=events,
        wake=lambda: None,
        away_s=away_s,
    )
    return remote, events


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def until(ready: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (value := ready()):
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)
    return value


def test_a_run_is_started_there_and_its_addresses_come_back(served: Served, run_dir: Path) -> None:
    remote, events = remote_of(served, run_dir)
    remote.start()
    try:
        remote.wait_ready(SECONDS)
        there = served.data / "runs" / "run-1"
        trainer = remote.addresses["trainer"]
        assert trainer["url"] == "grpc://127.0.0.1:1"
        assert trainer["token"] == served.host.run_token("run-1")
        assert trainer["files"] == {"url": f"{served.url}/v1/runs/run-1/files", "token": TOKEN, "root": str(there)}
        assert remote.addresses["rewards"][0]["token"] == trainer["token"]
        assert "token" not in remote.addresses["reference"], "a scorer of somebody else learns no token"
        assert remote.weights == {"url": "http://w/weights", "token": "w"}

        job = read_resolved(there / "job.yaml")
        assert (job.model.path, job.resources.ports.trainer, job.resources.ports.weights) == ("/there/model", 1, 3)
        assert (job.rollout.weight_transfer, job.resources.agents.trainer) == ("http", None)
        function = job.rewards[0].function.rpartition(":")[0]
        assert Path(function).is_relative_to(there)
        assert Path(function).read_text() == (run_dir.parent / "reward.py").read_text()
        seen = json.loads((there / "environment").read_text())
        assert (seen["token"], seen["agent"]) == (trainer["token"], None), "user code there learns no agent's token"
        assert seen["arguments"][2:] == ["--roles", "scorers,trainer", "--otlp", "http://127.0.0.1:4317"]
    finally:
        remote.stop()
        events.close()
    assert [e["state"] for e in read_events(run_dir / "events.jsonl") if e["kind"] == "role"] == ["starting", "ready"]
    until(lambda: served.get("/v1/runs/run-1").status_code == 404, "the end of the run there")


def test_a_host_that_was_started_again_is_asked_again_and_is_another_trainer(served: Served, run_dir: Path) -> None:
    remote, events = remote_of(served, run_dir)
    remote.start()
    try:
        remote.wait_ready(SECONDS)
        first = remote.addresses["trainer"]
        served.host.end()  # what a restart comes to: nothing of the run is known any more
        second = until(
            lambda: (entry := remote.addresses["trainer"]) and entry != first and entry, "another start of the trainer"
        )
        assert second["incarnation"] != first["incarnation"]
        assert second["token"] == first["token"]
        assert remote.changed()
        assert not remote.changed()
    finally:
        remote.stop()
        events.close()


def test_a_role_that_fails_there_fails_here_with_its_own_words(served: Served, run_dir: Path) -> None:
    (served.data / "fail").touch()
    remote, events = remote_of(served, run_dir)
    remote.start()
    try:
        with pytest.raises(BadInputError, match="rank 0 ran out of memory") as caught:
            remote.wait_ready(SECONDS)
        assert (caught.value.role, caught.value.fix) == ("trainer", "Take fewer")
    finally:
        remote.stop()
        events.close()


def test_an_agent_that_does_not_answer_is_named(run_dir: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        remote, events = remote_of(Served(None, f"http://127.0.0.1:{port}", run_dir), run_dir, away_s=0.5)  # type: ignore[arg-type]
        remote.start()
        with pytest.raises(NightshiftError, match=f"127.0.0.1:{port} did not answer"):
            remote.wait_ready(SECONDS)
        remote.stop()
        events.close()


def test_only_the_holder_of_the_token_is_answered(
    served: Served, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, path in (("GET", "/v1/runs/a"), ("PUT", "/v1/runs/a"), ("DELETE", "/v1/runs/a/files/checkpoints/x")):
        assert httpx.request(method, served.url + path, trust_env=False).status_code == 401
        wrong = {"Authorization": "Bearer no"}
        assert httpx.request(method, served.url + path, headers=wrong, trust_env=False).status_code == 401
    assert httpx.get(served.url + "/health", trust_env=False).status_code == 200
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(BadInputError, match=TOKEN_VARIABLE):
        remote_of(served, run_dir)


def test_a_machine_works_for_one_run_and_says_which(served: Served, run_dir: Path) -> None:
    request = request_of(spec_of(run_dir, served.url), frozenset({"trainer"}), None, served.url)
    served.host.begin("run-1", request)
    served.host.begin("run-1", request)  # asked twice: the same start
    with pytest.raises(BadInputError, match="at work for the run run-1"):
        served.host.begin("run-2", request)
    served.host.end("run-2")
    assert served.host.status("run-1", "", 0)
    served.host.end_idle(0.0)
    assert served.host.status("run-1", "", 0) is None, "nobody asked for it any more"
    served.host.begin("run-2", request)


@pytest.mark.parametrize(
    "wrong",
    [
        {"roles": ["rollout"]},
        {"roles": []},
        {"job": "a: ["},
        {"job": yaml.safe_dump({"name": "x"})},
        {"files": {"../../escape": "eA=="}},
    ],
)
def test_a_request_that_is_wrong_starts_nothing(served: Served, run_dir: Path, wrong: dict[str, Any]) -> None:
    request = request_of(spec_of(run_dir, served.url), frozenset({"trainer"}), None, served.url) | wrong
    answer = httpx.put(
        f"{served.url}/v1/runs/run-1", json=request, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
    )
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["message"]
    assert served.host.status("run-1", "", 0) is None
    assert not list(served.data.parent.glob("escape"))


def files_of(served: Served, run_dir: Path) -> TrainerFiles:
    address = FilesAddress(f"{served.url}/v1/runs/run-1/files", TOKEN, str(served.data / "runs" / "run-1"))
    return TrainerFiles(address, run_dir, away_s=1.0)


async def test_a_checkpoint_comes_here_and_its_resume_state_stays(served: Served, run_dir: Path) -> None:
    here, there = Checkpoints(run_dir), Checkpoints(served.data / "runs" / "run-1")
    for folder, name, content in (
        (there.export_dir(2), "model.safetensors", b"w" * 3_000_000),
        (there.export_dir(2), "nested/empty.json", b""),
        (there.state_dir(2), "manifest.json", b'{"step": 2, "lineage": 0}'),
        (there.state_dir(2), "engine/optimiser.pt", b"pickle"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    files = files_of(served, run_dir)
    assert files.there(here.state_dir(2)) == str(there.state_dir(2))
    for _ in range(2):  # a save that is repeated
        await files.fetch(str(here.state_dir(2)), str(here.export_dir(2)))
    assert (here.export_dir(2) / "model.safetensors").read_bytes() == b"w" * 3_000_000
    assert (here.export_dir(2) / "nested" / "empty.json").read_bytes() == b""
    assert here.committed() == [2]
    assert not (here.state_dir(2) / "engine").exists()
    assert here.broken() == []
    await files.remove(here.rotate(0))
    assert not there.state_dir(2).exists()
    assert not there.export_dir(2).exists()
    await files.close()


async def test_a_checkpoint_without_its_manifest_is_none(served: Served, run_dir: Path) -> None:
    here, there = Checkpoints(run_dir), Checkpoints(served.data / "runs" / "run-1")
    (there.state_dir(1)).mkdir(parents=True)
    (there.state_dir(1) / "engine").write_bytes(b"half")
    files = files_of(served, run_dir)
    with pytest.raises(RoleError, match="lacks"):
        await files.fetch(str(here.state_dir(1)), "")
    with pytest.raises(RoleError, match="404"):
        await files.fetch(str(here.state_dir(9)), "")
    assert here.committed() == []
    await files.close()


@pytest.mark.parametrize("path", ["job.yaml", "services.json", "../../x", "checkpoints/../services.json", "inputs"])
def test_nothing_else_of_a_run_can_be_read_or_removed(served: Served, path: str) -> None:
    folder = served.data / "runs" / "run-1"
    (folder / "inputs").mkdir(parents=True)
    (folder / "services.json").write_text("{}")
    with pytest.raises(BadInputError):
        served.host.file("run-1", path)
    with pytest.raises(BadInputError):
        served.host.remove("run-1", path)
    assert served.get(f"/v1/runs/run-1/files/{path}").status_code in (404, 422)
    assert (folder / "services.json").exists()
