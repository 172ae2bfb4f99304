"""The orchestrator's image, built from a local base and run as the chart's Deployment by podman: probes and SIGTERM.

``NIGHTSHIFT_PYTHON_IMAGE`` names the base, an image with Python 3.11 and its venv module that podman has;
``NIGHTSHIFT_BUILD_ARGS`` holds further arguments of ``buildah bud``, such as where pip finds packages.

Each test takes a free port. Pods and volumes have fixed names: what a killed attempt left of them is removed first.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from nightshift.client import Client
from nightshift.config.load import load_job
from services.rollout.launch import free_port
from tests.contract.test_service_process import write_job
from tests.deploy.charts import HOW, of_kind, rendered

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1800)]  # the builds of images in it
ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/nightshift/orchestrator:test"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SETTINGS = (
    "orchestrator.mode=remote",
    "images.orchestrator.repository=localhost/nightshift/orchestrator",
    "images.orchestrator.tag=test",
    "images.orchestrator.pullPolicy=Never",
)


def run(program: str, *arguments: str, timeout_s: float = 300, check: bool = True) -> str:
    found = shutil.which(program)
    assert found, f"{program} is not installed: {HOW}"
    done = subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(file: str, tag: str, base: str, *, context: str = ".", timeout_s: float = 900) -> None:
    """Builds an image with buildah from a local base; pip finds the certificates of this machine.

    Args:
        base: the build argument of the base, ``NAME=IMAGE``.
    """
    more = shlex.split(os.environ.get("NIGHTSHIFT_BUILD_ARGS", ""))
    certificates = ("-v", f"{CERTIFICATES}:/run/host-ca.crt:ro", "--build-arg", "PIP_CERT=/run/host-ca.crt")
    run(
        "buildah",
        *("bud", "--layers", "--isolation", "chroot", "--network", "host", "--format", "docker"),
        *(certificates if Path(CERTIFICATES).exists() else ()),
        *more,
        *("--build-arg", base, "-f", file, "-t", tag, context),
        timeout_s=timeout_s,
    )


def python_image() -> str:
    """The base that the environment names."""
    base = os.environ.get("NIGHTSHIFT_PYTHON_IMAGE")
    assert base, f"NIGHTSHIFT_PYTHON_IMAGE names no image to build from: {HOW}"
    return base


@pytest.fixture(scope="module")
def image() -> str:
    build("deploy/docker/orchestrator.Dockerfile", IMAGE, f"PYTHON_IMAGE={python_image()}")
    return IMAGE


def test_the_image_holds_no_heavy_library_and_knows_its_user(image: str) -> None:
    inspected = json.loads(run("podman", "image", "inspect", image))[0]
    found = inspected["Config"]
    assert found["User"] == "10001:10001"
    assert inspected["Healthcheck"]["Test"][:3] == ["CMD", "python", "-c"]
    assert not any("CERT" in variable or "INDEX" in variable for variable in found["Env"])
    listing = run("podman", "run", "--rm", "--entrypoint", "ls", image, "/opt/venv/lib/python3.11/site-packages")
    assert not set(listing.split()) & {"torch", "ray", "vllm", "deepspeed", "transformers"}


class Pod:
    """A rendered Deployment as podman's pod: played on entry, without leftovers of an earlier one, removed on exit."""

    def __init__(self, document: dict[str, Any], file: Path) -> None:
        file.write_text(yaml.safe_dump(document))
        self._file = str(file)
        self._name = document["metadata"]["name"]
        specification = document["spec"]["template"]["spec"]
        self._volumes = [
            volume.get("persistentVolumeClaim", {}).get("claimName", volume["name"])
            for volume in specification["volumes"]
            if "hostPath" not in volume
        ]
        (container,) = specification["containers"]
        self._container = str(container["name"])
        self.url = f"http://127.0.0.1:{container['ports'][0]['containerPort']}"

    def __enter__(self) -> Pod:
        self._remove()
        run("podman", "play", "kube", self._file)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @property
    def container(self) -> str:
        """The container's name; podman calls it by the pod's name and its own."""
        (name,) = (name for _, name in self._containers() if name.endswith(f"-{self._container}"))
        return name

    def _containers(self) -> list[tuple[str, str]]:
        """(pod, container) of all that podman has made of this Deployment, in whatever attempt, the ended ones too."""
        lines = run("podman", "ps", "-a", "--pod", "--format", "{{.PodName}} {{.Names}}").splitlines()
        both = (line.split() for line in lines if line.startswith(f"{self._name}-pod"))
        return [(pod, name) for pod, name in both]

    def _remove(self) -> None:
        run("podman", "play", "kube", "--down", self._file, check=False)
        for pod in {pod for pod, _ in self._containers()}:
            run("podman", "pod", "rm", "-f", "-t", "5", pod)
        run("podman", "volume", "rm", "-f", *self._volumes, check=False)


def deployment() -> dict[str, Any]:
    """The rendered Deployment on a free port, with what podman does not know replaced: named ports in probes."""
    port = free_port()
    (found,) = of_kind(rendered("values-cpu.yaml", settings=(*SETTINGS, f"orchestrator.port={port}")), "Deployment")
    document: dict[str, Any] = json.loads(json.dumps(found))
    (container,) = document["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        container[probe]["httpGet"]["port"] = port
    return document


@pytest.fixture
def pod(image: str, tmp_path: Path) -> Iterator[Pod]:
    with Pod(deployment(), tmp_path / "deployment.yaml") as played:
        yield played


@pytest.fixture
def pod_with_jobs(image: str, tmp_path: Path) -> Iterator[Pod]:
    """The same, where a process that makes steps and takes signals stands in for `nightshift run`, which needs the full
    image."""
    document = deployment()
    spec = document["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    command = ["env", "PYTHONPATH=/opt/nightshift:/opt/fakes", "python", "-m", "tests.fakes.job_process", "{folder}"]
    assert container["args"][0] == "up"
    container["command"] = ["python", "-P", "-m", "orchestrator.api"]  # what `nightshift up` becomes
    container["args"] = [*container["args"][1:], f"--command={json.dumps(command)}"]
    spec["volumes"].append({"name": "fakes", "hostPath": {"path": str(ROOT / "tests/fakes"), "type": "Directory"}})
    container["volumeMounts"].append({"name": "fakes", "mountPath": "/opt/fakes/tests/fakes", "readOnly": True})
    with Pod(document, tmp_path / "deployment.yaml") as played:
        yield played


def ready(url: str, seconds: float = 300) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = httpx.get(f"{url}/readyz", trust_env=False, timeout=2)
            if answer.status_code == 200:
                return dict(answer.json())
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"the service at {url} was not ready within {seconds:.0f} s"
        time.sleep(0.5)


def test_the_rendered_deployment_runs_passes_its_probes_and_keeps_its_state_over_a_restart(pod: Pod) -> None:
    assert ready(pod.url)["status"] == "ok"
    name = pod.container
    state = json.loads(run("podman", "inspect", name))[0]
    assert state["HostConfig"]["ReadonlyRootfs"] is True
    assert state["Config"]["User"].startswith("10001")
    assert not state["EffectiveCaps"]
    run("podman", "exec", name, "python", "-c", "open('/tmp/x', 'w')")
    assert run("podman", "exec", name, "touch", "/opt/x", check=False) == ""
    assert run("podman", "exec", name, "ls", "/opt").split() == ["nightshift", "venv"]
    token = run("podman", "exec", name, "cat", "/data/admin-token")
    text = httpx.get(f"{pod.url}/metrics", trust_env=False).text
    assert "nightshift_jobs" in text

    run("podman", "stop", "-t", "120", name)
    # A kill after the grace time would be 137.
    assert json.loads(run("podman", "inspect", name))[0]["State"]["ExitCode"] == 0
    run("podman", "start", name)
    ready(pod.url)
    assert run("podman", "exec", name, "cat", "/data/admin-token") == token


def test_the_rendered_deployment_survives_sigterm_with_a_running_job(pod_with_jobs: Pod, tmp_path: Path) -> None:
    """A rolling upgrade: the pod is told to end while a job runs, and the next one goes on with it."""
    url, name = pod_with_jobs.url, pod_with_jobs.container
    ready(url)
    token = run("podman", "exec", name, "cat", "/data/admin-token").strip()
    job = load_job(write_job(tmp_path / "mine", steps=80, step_s=0.2), check_files=False)
    with Client(url, token) as client:
        job_id = client.submit(job).id
        waiting = client.submit(job, idempotency_key="second").id
        deadline = time.monotonic() + 300
        while client.get(job_id).step < 3:
            assert time.monotonic() < deadline, client.get(job_id)
            time.sleep(0.2)
    run("podman", "stop", "-t", "120", name)
    state = json.loads(run("podman", "inspect", name))[0]["State"]
    assert state["ExitCode"] == 0, "it ended by itself, and was not killed"
    run("podman", "start", name)
    ready(url)
    with Client(url, token) as client:
        for found in (job_id, waiting):
            done = client.wait(found, 600)
            assert (done.state, done.step) == ("succeeded", 80)
            ledger = client.ledger(found)
            assert (ledger["trained"], ledger["balanced"]) == (80, True)
            steps = [event.data["step"] for event in client.events(found) if event.kind == "step"]
            assert steps == list(range(1, 81)), "each step is made once"
    starts = run("podman", "exec", name, "cat", f"/data/runs/{job_id}/starts.txt").splitlines()
    assert len(starts) == 2
    assert int(starts[1].split()[1]) >= 3, "it went on at the checkpoint that it had left"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Podman behind Docker's API; the environment that Docker Compose finds it by."""
    socket = tmp_path / "podman.sock"
    program = shutil.which("podman")
    assert program, f"podman is not installed: {HOW}"
    process = subprocess.Popen(
        [program, "system", "service", "-t", "300", f"unix://{socket}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not socket.exists():
            assert time.monotonic() < deadline, "podman's service did not start"
            time.sleep(0.1)
        yield {**os.environ, "DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "0"}
    finally:
        process.terminate()
        process.wait(20)


def test_the_compose_files_service_runs_hardened(image: str, engine: dict[str, str], tmp_path: Path) -> None:
    override, port = tmp_path / "override.yml", free_port()
    service = f'{{image: {image}, build: !reset null, ports: !override ["127.0.0.1:{port}:8700"]}}'
    override.write_text(f"services:\n  nightshift: {service}\n")
    program = shutil.which("docker-compose")
    assert program, f"docker-compose is not installed: {HOW}"

    def compose(*arguments: str) -> str:
        files = ("-f", "docker-compose.yml", "-f", str(override))
        done = subprocess.run(
            [program, "-p", "nightshift-test", *files, *arguments],
            cwd=ROOT,
            env=engine,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    compose("down", "-v", "-t", "5")  # what a killed attempt has left
    try:
        compose("up", "-d", "--pull", "never", "nightshift")
        assert ready(f"http://127.0.0.1:{port}")["status"] == "ok"
        name = compose("ps", "-q", "nightshift").strip()
        state = json.loads(run("podman", "inspect", name))[0]
        assert state["HostConfig"]["ReadonlyRootfs"] is True
        assert not state["EffectiveCaps"]
        assert state["HostConfig"]["ShmSize"] == 2 << 30
    finally:
        compose("down", "-v", "-t", "20")


def test_the_rollout_image_brings_guard_route_and_plugin(image: str, tmp_path: Path) -> None:
    """On a stand-in for vLLM's image: Python with pip, and nothing of vLLM."""
    stand_in, made = "localhost/vllm-stand-in:test", IMAGE.replace("orchestrator", "rollout")
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE\nFROM ${BASE}\nRUN apt-get update && apt-get install -y --no-install-recommends python3-pip\n"
    )
    build(str(tmp_path / "Dockerfile"), stand_in, f"BASE={python_image()}", context=str(tmp_path), timeout_s=900)
    build("deploy/docker/rollout.Dockerfile", made, f"VLLM_IMAGE={stand_in}", timeout_s=900)
    program = (
        "import importlib.metadata as m, os, msgpack, services.rollout.guard as g\n"
        "print(os.getuid(), g.decide('GET', '/health', [], b't'), g.decide('POST', '/pause', [], b't'))\n"
        "print([e.name for e in m.entry_points(group='vllm.general_plugins')])"
    )
    said = run(
        "podman", "run", "--rm", "--read-only", "--cap-drop", "ALL", "--entrypoint", "python3", made, "-c", program
    )
    assert said.split("\n")[:2] == ["10001 200 401", "['nightshift_rollout']"]
