"""Images and compose files: linted by hadolint and Docker Compose, and held to the rules of the chart's pods."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.deploy
ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("orchestrator", "ray", "rollout")
HOW = "see docs/deployment.md, Test the deployment"


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which(program)
    assert found, f"{program} is not installed: {HOW}"
    return subprocess.run(
        [found, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile's last stage."""
    text = re.sub(r"\\\n", " ", (ROOT / f"deploy/docker/{name}.Dockerfile").read_text())
    lines = [line.split(None, 1) for line in text.splitlines() if re.match(r"[A-Z]+\s", line)]
    last = max(at for at, (word, _) in enumerate(lines) if word == "FROM")
    return [(word, rest) for word, rest in lines[last:]]


@pytest.mark.parametrize("name", IMAGES)
def test_a_dockerfile_has_no_finding(name: str) -> None:
    done = run("hadolint", f"deploy/docker/{name}.Dockerfile")
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_a_planted_fault(tmp_path: Path) -> None:
    text = (ROOT / "deploy/docker/orchestrator.Dockerfile").read_text()
    (tmp_path / "Dockerfile").write_text(
        text.replace("python:3.11.14-slim-bookworm", "python") + "\nRUN pip install six\n"
    )
    assert "DL3013" in run("hadolint", str(tmp_path / "Dockerfile")).stdout


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_pinned_not_root_and_checked(name: str) -> None:
    last = instructions(name)
    assert [rest for word, rest in last if word == "USER"] == ["10001:10001"]
    assert any(word == "HEALTHCHECK" for word, _ in last)
    text = (ROOT / f"deploy/docker/{name}.Dockerfile").read_text()
    for base in re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE):
        assert re.search(r":[\w.-]*\d[\w.-]*$", base)
    assert "latest" not in text
    order = [word for word, _ in last]
    assert order.index("USER") > max(at for at, word in enumerate(order) if word in ("RUN", "COPY"))


def compose(*files: str, **environment: str) -> dict[str, Any]:
    arguments = [part for file in files for part in ("-f", file)]
    done = run("docker-compose", *arguments, "--profile", "cpu", "config", "--format", "json", **environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_compose_file_is_valid_and_its_services_are_hardened() -> None:
    services = compose("docker-compose.yml")["services"]
    assert set(services) == {
        *("nightshift", "demo", "rollout", "trainer", "scorers", "demo-data"),
        *("prometheus", "grafana", "traces"),
    }
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service["image"].endswith(":latest"), name
        assert ":" in service["image"].rpartition("/")[2], name
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", f"{name} is reachable from outside"


def test_the_compose_file_mounts_what_is_there() -> None:
    for service in compose("docker-compose.yml")["services"].values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume["source"]


def test_the_demos_containers_share_nothing_but_the_network() -> None:
    services = compose("docker-compose.yml")["services"]
    roles = ("demo", "rollout", "trainer", "scorers")
    for name in roles:
        service = services[name]
        assert not {"ipc", "pid", "network_mode", "volumes_from"} & service.keys(), name
        volumes = [volume["source"] for volume in service["volumes"]]
        others = [v["source"] for other in roles if other != name for v in services[other]["volumes"]]
        assert not set(volumes) & set(others), name
    for name, variable in (("rollout", "NIGHTSHIFT_ROLLOUT_TOKEN"), ("trainer", "NIGHTSHIFT_AGENT_TOKEN")):
        assert services[name]["environment"][variable] == "", "there is no token that everybody has"
    told = services["demo"]["environment"]
    assert told["NIGHTSHIFT_TRAINER_AGENT"] == "http://trainer:8710"
    assert services["rollout"]["environment"]["NIGHTSHIFT_WEIGHT_URL"] == "http://trainer:8713"


def test_the_gpu_override_asks_for_devices_and_for_an_image() -> None:
    files = ("docker-compose.yml", "deploy/docker/compose.gpu.yml")
    services = compose(*files, NIGHTSHIFT_CUDA_IMAGE="cuda:13.0-py312")["services"]
    for name in ("nightshift", "rollout", "trainer", "scorers"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
    arguments = [part for file in files for part in ("-f", file)]
    without = run("docker-compose", *arguments, "--profile", "cpu", "config", "-q", NIGHTSHIFT_CUDA_IMAGE="")
    assert "name an image with CUDA" in without.stderr, "asked for, since there is none that fits everybody"


def test_prometheus_of_the_compose_file_is_configured_as_runs_write_their_targets(tmp_path: Path) -> None:
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    rules = ROOT / "deploy/helm/nightshift/files/rules.yaml"
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/rules.yaml", str(rules)))
    done = run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    (files,) = yaml.safe_load(text)["scrape_configs"][0]["file_sd_configs"]
    assert files["files"] == ["/data/runs/prometheus/*.json"]


def test_grafana_of_the_compose_file_reads_the_checked_in_dashboards() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/nightshift.yml").read_text())["providers"]
    mounts = {v["target"]: v["source"] for v in compose("docker-compose.yml")["services"]["grafana"]["volumes"]}
    assert Path(mounts[provider["options"]["path"]]) == ROOT / "deploy/helm/nightshift/files/dashboards"
    sources = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    assert {source["type"] for source in sources} == {"prometheus", "jaeger"}
