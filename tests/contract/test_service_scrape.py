"""The service's /metrics holds those of its runs: runners, vLLM and Ray, each series with its run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from orchestrator.api.metrics import RunMetrics, merge, write_targets
from orchestrator.api.scrape import run_expositions, with_labels
from tests.fakes.run import FakeRun

VLLM = b"""# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a{b} c"} 3.0
# TYPE process_open_fds gauge
process_open_fds 7.0
"""


@pytest.fixture
def server() -> Iterator[str]:
    """A process that exports VLLM; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(VLLM)

        def log_message(self, *arguments: object) -> None:
            pass

    serving = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{serving.server_port}"
    serving.shutdown()
    serving.server_close()


def series(text: bytes) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in parse(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_runs_and_what_they_started_are_in_one_answer(tmp_path: Path, server: str) -> None:
    runners = []
    for run in ("r1", "r2"):
        metrics = RunMetrics(run)
        metrics.on_event({"kind": "step", "metrics": {"reward/mean": 1.0}})
        runners.append(metrics)
        address = f"127.0.0.1:{metrics.serve(0)}"
        write_targets(tmp_path / run, {"nightshift": [address], "nightshift-rollout": [server]})
    try:
        found = series(merge(run_expositions(tmp_path)))
    finally:
        for metrics in runners:
            metrics.close()
    assert [labels["run_id"] for labels in found["nightshift_reward_mean"]] == ["r1", "r2"]
    for labels in found["vllm:num_requests_running"]:
        assert labels["job"] == "nightshift-rollout"
        assert labels["model_name"] == "a{b} c"
    processes = [(labels["run_id"], labels["job"]) for labels in found["process_open_fds"]]
    assert sorted(processes) == sorted(
        (run, job) for run in ("r1", "r2") for job in ("nightshift", "nightshift-rollout")
    )


def test_labels_that_a_series_has_are_not_doubled() -> None:
    text = b'a{run_id="r1",x="y"} 1\nb 2\n# TYPE c gauge\nc{} 3\nd{x="1"} 4 1700000000000\n'
    lines = with_labels(text, {"run_id": 'r"2'}).split(b"\n")
    assert lines[0] == b'a{run_id="r1",x="y"} 1'
    assert lines[1] == rb'b{run_id="r\"2"} 2'
    assert lines[4] == rb'd{run_id="r\"2",x="1"} 4 1700000000000'


def test_what_does_not_answer_or_lies_beyond_loopback_is_left_out(tmp_path: Path, server: str) -> None:
    write_targets(tmp_path / "r1", {"nightshift": ["127.0.0.1:9", server, "192.0.2.1:80", "localhost.example:80"]})
    (tmp_path / "prometheus" / "half.json").write_text('[{"targets": ["127.0.0.1:1"')
    (tmp_path / "prometheus" / "odd.json").write_text(json.dumps({"targets": 3}))
    assert len(run_expositions(tmp_path, timeout_s=1.0)) == 1
    assert run_expositions(tmp_path / "none") == []


async def test_a_job_without_a_port_serves_its_metrics_where_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_METRICS_PORT", "0")
    async with FakeRun(tmp_path, prompts=2, pipeline={"role_timeout_s": 60.0}) as run:
        assert await run.run(limit_s=90.0) == 0, run.error()
        assert len(run.events("metrics")) == 1
