"""A whole job whose trainer, scorers and vLLM run elsewhere: connected by URLs, with no folder in common."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from nightshift.analysis.audit import audit
from nightshift.analysis.evidence import load
from nightshift.config.load import load_job
from services.rollout.keeper import descendants
from services.rollout.launch import VllmServer, free_port
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import ROOT, Running, leftovers, write_job

pytestmark = pytest.mark.integration
TOKEN = "token-of-the-agents"


@dataclass
class Elsewhere:
    """One role's machine: folders of its own, and a process."""

    folder: Path
    pid: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """What a process there sees: its own home, temporary files and memory."""
        own = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp")}
        return own | {"NIGHTSHIFT_AGENT_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    @classmethod
    def make(cls, folder: Path, model: Path) -> Elsewhere:
        """Folders of a machine, with a copy of the model."""
        made = cls(folder)
        for name in ("home", "tmp", "shm", "data"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        shutil.copytree(model, folder / "model")
        return made

    def open_files(self) -> set[str]:
        """Regular files that its processes hold open or have mapped."""
        found: set[str] = set()
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(OSError):
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        found.add(os.readlink(link))  # noqa: PTH115
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    found.add(line.split(maxsplit=5)[5] if line.count(" ") > 4 and "/" in line else "")
        return {name.removesuffix(" (deleted)") for name in found if name.startswith("/")}


@contextlib.contextmanager
def agent_host(place: Elsewhere, port: int, weights_port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that starts roles for other hosts."""
    command = [sys.executable, "-P", "-m", "services.agent.host", "--port", str(port)]
    command += ["--trainer-port", "0", "--scorers-port", "0", "--weights-port", str(weights_port)]
    command += ["--data-dir", str(place.folder / "data"), "--set", f"model.path={place.folder / 'model'}"]
    command += ["--set", f"resources.weight_store={place.folder / 'shm'}"]
    with (place.folder / "host.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | place.environment, cwd=place.folder, stdout=log, stderr=subprocess.STDOUT
        )
    place.pid = process.pid
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            assert time.monotonic() < deadline, (place.folder / "host.log").read_text()
            assert process.poll() is None, (place.folder / "host.log").read_text()
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(150)
        finally:
            process.kill()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short name: sockets of Ray and vLLM lie below it, whose paths may have 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="nsr"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_job_runs_over_urls_alone_and_its_books_are_proved(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(short_path / "built")
    places = {name: Elsewhere.make(short_path / name, model) for name in ("runner", "trainer", "scorers", "vllm")}
    shutil.rmtree(model)
    ports = {name: free_port() for name in ("trainer", "scorers", "weights", "unused")}
    job = write_job(
        places["runner"].folder / "job",
        places["runner"].folder / "model",
        pipeline={"max_staleness": 1, "deterministic": False, "role_timeout_s": 240},
        trainer={"total_steps": 3, "save_freq": 1, "micro_batch_size": 4, "test_freq": 0, "learning_rate": 1e-3},
        checkpoint={"keep": 1},
        resources={
            "agents": {"trainer": f"http://127.0.0.1:{ports['trainer']}"},
            "weight_store": str(places["runner"].folder / "shm"),
        },
        rollout={"url": "http://127.0.0.1:1"},
    )
    spec = load_job(job)
    spec.model.path = str(places["vllm"].folder / "model")
    cores = sorted(os.sched_getaffinity(0))
    with monkeypatch.context() as there:
        for name, value in places["vllm"].environment.items():
            there.setenv(name, value)
        server = VllmServer(
            spec,
            store=None,
            log_path=places["vllm"].folder / "logs" / "vllm.log",
            cores=cores[:1],
            weights_url=f"http://127.0.0.1:{ports['weights']}/weights",
            cache=places["vllm"].folder / "shm",
            name="night-0",
        )
        server.spawn()
    for name, value in places["runner"].environment.items():
        monkeypatch.setenv(name, value)
    with (
        contextlib.ExitStack() as ending,
        agent_host(places["trainer"], ports["trainer"], ports["weights"]),
        agent_host(places["scorers"], ports["scorers"], ports["unused"]),
    ):
        ending.callback(server.stop)
        server.wait_ready()
        places["vllm"].pid = server.pid
        monkeypatch.setenv("NIGHTSHIFT_ROLLOUT_TOKEN", server.token)
        monkeypatch.setenv("NIGHTSHIFT_SCORERS_AGENT", f"http://127.0.0.1:{ports['scorers']}")  # of the installation
        running = Running(job, f"rollout.url={server.url}")
        places["runner"].pid = running.process.pid
        running.wait_for("step", timeout_s=330)
        held = {name: place.open_files() for name, place in places.items()}
        finished = running.finish(timeout_s=330)
    assert finished.code == 0, finished.output
    assert len(finished.metrics()) == 3
    assert finished.metrics()[-1]["kl"] > 0, "the weights that were trained are those that were sampled from"

    # Nothing was shared: what one machine's processes hold lies in none of the others' folders.
    for name, place in places.items():
        others = [other.folder for other in places.values() if other is not place]
        for path in held[name]:
            assert not any(Path(path).is_relative_to(other) for other in others), f"{name} holds {path}"
    shared = [{p for p in paths if p.startswith(("/dev/shm", "/tmp/ns-"))} for paths in held.values()]
    assert not set.intersection(*shared)
    for at, one in enumerate(shared):
        assert not any(one & other for other in shared[at + 1 :]), "memory is shared between machines"

    # The books: manifests from the trainer's host, tokens from the server's own log, both brought here.
    found = audit(load(finished.folder))
    assert found.balanced, found.findings
    assert (found.step, found.servers) == (3, 1)
    assert found.requests >= 24
    assert (finished.weights(3)).is_file()
    there_states = sorted(p.name for p in (places["trainer"].folder / "data").glob("runs/*/checkpoints/trainer/*"))
    assert there_states == ["global_step_3"], "rotated there as well"
    assert leftovers(finished.folder.name) == []
