"""The compose file's CPU profile as containers that share no folder and no memory: one whole job through it.

Built is a thin image of the sources; torch, Ray and vLLM come from this test's own virtual environment, mounted
read-only where the image ``nightshift/ray`` would hold them, and the job is a small one on a tiny model.
``NIGHTSHIFT_PYTHON_IMAGE`` names the base, as for tests/deploy/test_containers.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nightshift.analysis.audit import audit
from nightshift.analysis.evidence import load
from nightshift.wire.events import read_events
from tests.deploy.charts import HOW
from tests.deploy.test_containers import ROOT, engine, run
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import write_job

__all__ = ["engine"]  # a fixture
pytestmark = pytest.mark.deploy
IMAGE = "localhost/nightshift/thin:test"
PROJECT = "nightshift-stack"
ROLES = ("rollout", "trainer", "scorers")


def environment_folder() -> Path:
    """The virtual environment that holds vLLM; this test may run in one that builds on it."""
    found = importlib.util.find_spec("vllm")
    assert found is not None, "vLLM is not installed: make venv-dev"
    assert found.origin is not None
    return Path(found.origin).parents[4]


@pytest.fixture
def thin_image(tmp_path: Path) -> Iterator[str]:
    """The sources and a user; Python and its packages are mounted."""
    base = os.environ.get("NIGHTSHIFT_PYTHON_IMAGE")
    assert base, f"NIGHTSHIFT_PYTHON_IMAGE names no image to build from: {HOW}"
    context = tmp_path / "context"
    for room in ("nightshift", "orchestrator", "services"):
        shutil.copytree(ROOT / room, context / room, ignore=shutil.ignore_patterns("__pycache__"))
    mounts = {environment_folder(), Path(sys.base_prefix)}
    # What lies between the root and a mount must let another user pass.
    parents = sorted({str(parent) for mount in mounts for parent in mount.parents if str(parent) != "/"})
    (context / "Dockerfile").write_text(
        f"FROM {base}\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 procps \\\n"
        f" && mkdir -p {' '.join(map(str, mounts))} && chmod 755 {' '.join(parents)} \\\n"
        " && groupadd --gid 10001 nightshift \\\n"
        " && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp nightshift \\\n"
        " && install -d -o 10001 -g 10001 /data\n"
        + "".join(f"COPY {room} /opt/nightshift/{room}\n" for room in ("nightshift", "orchestrator", "services"))
        + f"ENV PATH={environment_folder()}/bin:/usr/bin:/bin PYTHONPATH=/opt/nightshift PYTHONUNBUFFERED=1 HOME=/tmp "
        "HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 "
        # The image `ray` holds DeepSpeed's operators; here they are compiled, and /tmp executes nothing.
        "TORCH_EXTENSIONS_DIR=/data/torch_extensions\n"
        "USER 10001:10001\nWORKDIR /data\n"
        'ENTRYPOINT ["python", "-m", "nightshift.cli.main"]\n'
    )
    common = ("bud", "--layers", "--isolation", "chroot", "--network", "host", "--format", "docker")
    run("buildah", *common, "-t", IMAGE, str(context), timeout_s=300)
    yield IMAGE
    run("podman", "rmi", "-f", IMAGE, check=False)


@pytest.fixture
def compose(thin_image: str, engine: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Docker Compose on the repository's file, with what the test puts in place of images and of the demo's job."""
    model = build_tiny_model(tmp_path / "model")
    job = write_job(
        tmp_path / "job",
        Path("/models/tiny"),
        pipeline={"max_staleness": 1, "deterministic": False, "role_timeout_s": 300},
        trainer={"total_steps": 3, "save_freq": 1, "micro_batch_size": 4, "test_freq": 0, "learning_rate": 1e-3},
        checkpoint={"keep": 1},
    )
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    mounts = [f"{folder}:{folder}:ro" for folder in sorted({str(environment_folder()), sys.base_prefix})]
    mounts += [f"{model}:/models/tiny:ro", f"{job.parent}:/job:ro"]  # what everybody reads and nobody writes

    def service(**more: Any) -> dict[str, Any]:
        return {"image": thin_image, "volumes": mounts, **more}

    server = "exec python -P -m services.rollout.serve /job/job.yaml model.path=/models/tiny"
    server += " resources.rollout_cores=[0] --host 0.0.0.0 --request-log /data/requests.jsonl"
    overrides = {
        "rollout": service(command=[server]),
        **{
            role: service(command=["--host", role, "--data-dir", "/data", "--set", "model.path=/models/tiny"])
            for role in ("trainer", "scorers")
        },
        "demo": service(command=["run", "/job/job.yaml", "resources.runs_dir=/data/runs", "resources.ports.otlp=4317"]),
    }
    text = yaml.safe_dump({"services": overrides})
    # No other services: their images are in no registry that this test can reach.
    text = text.replace("  demo:\n", "  demo:\n    depends_on: !reset null\n    ports: !reset null\n")
    override = tmp_path / "override.yml"
    override.write_text(text)
    program = shutil.which("docker-compose")
    assert program, f"docker-compose is not installed: {HOW}"

    def call(*arguments: str, timeout_s: float = 180) -> str:
        files = ("-f", "docker-compose.yml", "-f", str(override))
        done = subprocess.run(
            [program, "-p", PROJECT, "--profile", "cpu", *files, *arguments],
            cwd=ROOT,
            env={**engine, "NIGHTSHIFT_STACK_TOKEN": "token-of-the-stack"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        yield call
    finally:
        call("down", "-v", "-t", "30")


def logs_of(name: str) -> str:
    done = subprocess.run(["podman", "logs", "--tail", "60", name], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_the_stack_runs_a_job_in_containers_that_share_nothing(compose: Callable[..., str], tmp_path: Path) -> None:
    compose("up", "-d", "--pull", "never", "--no-build", *ROLES)
    names = {role: compose("ps", "-q", role).strip() for role in ROLES}
    deadline = time.monotonic() + 300
    services = json.loads(compose("config", "--format", "json"))["services"]
    # Podman runs no health checks by itself without systemd, and takes apart at blanks what comes through Docker's API.
    for role, name in names.items():
        check = services[role]["healthcheck"]["test"][1:]
        while subprocess.run(["podman", "exec", name, *check], capture_output=True, timeout=60).returncode:
            assert time.monotonic() < deadline, f"{role}: {logs_of(name)}"
            time.sleep(1)
    compose("up", "-d", "--pull", "never", "--no-build", "demo")
    demo = names["demo"] = compose("ps", "-a", "-q", "demo").strip()
    states = {role: json.loads(run("podman", "inspect", name))[0] for role, name in names.items()}
    for kind in ("ipc", "mnt", "net", "pid"):
        spaces = [os.readlink(f"/proc/{state['State']['Pid']}/ns/{kind}") for state in states.values()]  # noqa: PTH115
        assert len(set(spaces)) == len(spaces), f"containers share their {kind} namespace"
    written = [m["Source"] for state in states.values() for m in state["Mounts"] if m["RW"]]
    assert len(set(written)) == len(written), "two containers can write to one folder"
    for state in states.values():
        assert state["HostConfig"]["ReadonlyRootfs"] is True
        assert not state["EffectiveCaps"]

    done = subprocess.run(["podman", "wait", demo], capture_output=True, text=True, timeout=400)
    assert done.stdout.strip() == "0", logs_of(demo) + "".join(logs_of(names[role]) for role in ROLES)
    run("podman", "cp", f"{demo}:/data/runs", str(tmp_path / "runs"))
    (folder,) = (tmp_path / "runs").glob("tiny-*")
    events = read_events(folder / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3]
    spans = {(event["role"], event["name"]) for event in events if event["kind"] == "span"}
    assert {("trainer", "trainer.update"), ("reward", "reward.score"), ("reference", "reference.log_probs")} <= spans
    found = audit(load(folder))
    assert found.balanced, found.findings
    assert (found.step, found.servers) == (3, 1)
    assert found.requests >= 24
    assert (folder / "checkpoints" / "actor" / "global_step_3" / "model.safetensors").is_file()
