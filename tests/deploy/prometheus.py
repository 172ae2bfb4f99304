"""A real Prometheus for tests: scrapes what the runs name, with our rules, each second."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART_FILES = ROOT / "deploy/helm/nightshift/files"


class Prometheus:
    """A server's address and what is asked of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=10.0)

    def get(self, path: str, **parameters: Any) -> Any:
        """The ``data`` of an API call."""
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query of a dashboard, over all runs."""
        return list(self.get("query", query=runnable(expr))["result"])

    def range(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The curves of a query of a dashboard, over all runs."""
        result = self.get("query_range", query=runnable(expr), start=start, end=end, step=step)["result"]
        return list(result)

    def unanswered(self, queries: list[str]) -> list[str]:
        """Those of the queries that return no series now."""
        return [expr for expr in queries if not self.query(expr)]


def runnable(expr: str) -> str:
    """A dashboard's query with Grafana's variables filled in."""
    return expr.replace("$__rate_interval", "10s").replace("$run_id", ".*")


@contextmanager
def prometheus(folder: Path, runs: Path) -> Iterator[Prometheus]:
    """Serves a Prometheus on a free port of loopback until the end of the block.

    Args:
        folder: for its files.
        runs: folder of runs; what they write for Prometheus is watched.
    """
    program = shutil.which("prometheus")
    assert program, "prometheus is not installed: see docs/deployment.md, Test the deployment"
    folder.mkdir(parents=True, exist_ok=True)
    rules = re.sub(r"interval: 30s", "interval: 1s", (CHART_FILES / "rules.yaml").read_text())
    (folder / "rules.yaml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "runs",
                "file_sd_configs": [{"files": [f"{runs}/prometheus/*.json"], "refresh_interval": "1s"}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{server.url}/-/ready", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "Prometheus was not ready within 120 s"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)
