"""The image `ray`, built from a local base, and the compose file's CPU profile on it: one whole job through containers
that share no folder and no memory, with a read-only root and no compiler. The job is a small one on a tiny model.

``NIGHTSHIFT_PYTHON_IMAGE`` and ``NIGHTSHIFT_BUILD_ARGS`` as for tests/deploy/test_containers.py; pip must find the CPU
build of torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
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
from tests.deploy.test_containers import ROOT, build, engine, python_image, run
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import write_job

__all__ = ["engine"]  # a fixture
pytestmark = [pytest.mark.deploy, pytest.mark.timeout(3600)]  # the build of the image in it
IMAGE = "localhost/nightshift/ray:test"
PROJECT = "nightshift-stack"
ROLES = ("rollout", "trainer", "scorers")


@pytest.fixture(scope="module")
def ray_image() -> str:
    """The image as its Dockerfile says; layers of an earlier build are taken again."""
    build("deploy/docker/ray.Dockerfile", IMAGE, f"PYTHON_IMAGE={python_image()}", timeout_s=2400)
    return IMAGE


def in_image(image: str, program: str, timeout_s: float = 600) -> str:
    """What a program of Python prints in the image as the chart and compose run it."""
    hardened = ("--read-only", "--cap-drop", "ALL", "--network", "none", "--tmpfs", "/tmp")
    return run("podman", "run", "--rm", *hardened, "--entrypoint", "python", image, "-c", program, timeout_s=timeout_s)


def test_the_ray_image_knows_its_user_and_has_no_compiler(ray_image: str) -> None:
    inspected = json.loads(run("podman", "image", "inspect", ray_image))[0]
    assert inspected["Config"]["User"] == "10001:10001"
    assert inspected["Healthcheck"]["Test"][:3] == ["CMD", "python", "-c"]
    assert not any("CERT" in variable or "INDEX" in variable for variable in inspected["Config"]["Env"])
    program = (
        "import json, os, shutil\n"
        "def refused(path):\n"
        "    try: open(path, 'w').close()\n"
        "    except OSError as error: return os.strerror(error.errno)\n"
        "found = [name for name in ('gcc', 'g++', 'cc', 'c++', 'clang', 'ninja', 'nvcc') if shutil.which(name)]\n"
        "print(json.dumps([os.getuid(), refused('/opt/nightshift/x'), found]))"
    )
    uid, refused, compilers = json.loads(in_image(ray_image, program))
    assert uid == 10001
    assert refused in ("Read-only file system", "Permission denied")
    assert set(compilers) <= {"ninja"}, "what DeepSpeed needs is compiled when the image is built"


def test_the_ray_image_holds_what_scorers_trainer_and_servers_need(ray_image: str) -> None:
    """DeepSpeed's operators among it: they load where nothing could compile them."""
    program = (
        "import deepspeed, json, ray, torch, transformers, vllm\n"
        "from deepspeed.git_version_info import installed_ops\n"
        "from deepspeed.ops.op_builder import CPUAdamBuilder, ShareMemCommBuilder\n"
        "import orchestrator.runner.job, services.agent.host, services.rollout.serve\n"
        "import services.scorers.deploy, services.scorers.reference, services.trainer.rank_actor\n"
        "loaded = [builder().load().__name__ for builder in (CPUAdamBuilder, ShareMemCommBuilder)]\n"
        "print(json.dumps([installed_ops['cpu_adam'], installed_ops['deepspeed_shm_comm'], loaded]))"
    )
    adam, shared, loaded = json.loads(in_image(ray_image, program).splitlines()[-1])
    assert adam
    assert shared
    assert len(loaded) == 2


@pytest.fixture
def compose(ray_image: str, engine: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., str]]:
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
    mounts = [f"{model}:/models/tiny:ro", f"{job.parent}:/job:ro"]  # what everybody reads and nobody writes

    def service(**more: Any) -> dict[str, Any]:
        return {"image": ray_image, "volumes": mounts, **more}

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

    def call(*arguments: str, timeout_s: float = 600) -> str:
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

    call("down", "-v", "-t", "5")  # what a killed attempt has left
    try:
        yield call
    finally:
        call("down", "-v", "-t", "30")


def logs_of(name: str) -> str:
    done = subprocess.run(["podman", "logs", "--tail", "60", name], capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_the_stack_runs_a_job_in_containers_that_share_nothing(compose: Callable[..., str], tmp_path: Path) -> None:
    compose("up", "-d", "--pull", "never", "--no-build", *ROLES)
    names = {role: compose("ps", "-q", role).strip() for role in ROLES}
    deadline = time.monotonic() + 600
    services = json.loads(compose("config", "--format", "json"))["services"]
    # Podman runs no health checks by itself without systemd, and takes apart at blanks what comes through Docker's API.
    for role, name in names.items():
        check = services[role]["healthcheck"]["test"][1:]
        while subprocess.run(["podman", "exec", name, *check], capture_output=True, timeout=300).returncode:
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

    done = subprocess.run(["podman", "wait", demo], capture_output=True, text=True, timeout=900)
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
