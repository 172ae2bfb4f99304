"""Weights to several servers inside one GPU, and by NCCL; each push is proved by the log-prob probe of a whole job.

Run where there is a GPU, with a tokenizer's folder in NIGHTSHIFT_TEST_TOKENIZER:
pytest -m gpu tests/gpu/test_nccl.py

NCCL takes two processes of one device since 2.30, where it is asked for. A library of that version goes into
NIGHTSHIFT_TEST_NCCL where torch's own is older; without it, and with one device, the tests of NCCL fail.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from nightshift.gpu import ask_driver
from tests.gpu.jobs import run_steps, write_job

pytestmark = pytest.mark.gpu
#: Enough that a server can be killed between two of them.
STEPS = 30
SMALL: dict[str, Any] = {
    "data": {"max_prompt_length": 64},
    "pipeline": {"max_staleness": 1, "role_timeout_s": 120},
    "trainer": {"max_tokens_per_micro_batch": 2048, "learning_rate": 1e-4, "compile": False},
}
ROLLOUT: dict[str, Any] = {
    "batch_size": 8,
    "n": 4,
    "max_response_length": 64,
    "min_response_length": 64,
    "kv_cache_gib": 2,
    "max_num_seqs": 64,
}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which trainer and server may be on one device."""
    driver = ask_driver()
    assert driver is not None
    if library := os.environ.get("NIGHTSHIFT_TEST_NCCL"):
        for name in ("LD_PRELOAD", "VLLM_NCCL_SO_PATH"):
            monkeypatch.setenv(name, library)
        monkeypatch.setenv("RAY_LD_PRELOAD_ON_WORKERS", "1")
    if len(driver.gpus) == 1:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")


def check(folder: Path, events: list[dict[str, Any]], output: str, steps: int) -> list[dict[str, float]]:
    """What must hold of every run: each push was proved, and nothing went through files."""
    metrics = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(metrics) >= steps, output
    assert metrics[0]["log_ratio/abs_mean"] < 0.1
    assert all(step["sync/changed_fraction"] > 0.05 for step in metrics)
    assert not list((Path("/dev/shm") / f"nightshift-{folder.name}").glob("*.safetensors"))
    return metrics


def complaints(events: list[dict[str, Any]]) -> list[str]:
    return [event["message"] for event in events if event["kind"] == "warning" and "left" not in event["message"]]


def test_two_servers_on_one_device_take_the_weights_inside_it(model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, model, 5, **SMALL, rollout={**ROLLOUT, "servers": 2})
    folder, events, output = run_steps(job, 5, 200)
    metrics = check(folder, events, output, 5)
    assert complaints(events) == [], output
    for name in ("rollout-0", "rollout-1"):
        served = [json.loads(line) for line in requests(folder, name)]
        print(f"{name}: {len(served)} lines in its request log", flush=True)
        assert len(served) > 5
    assert max(step["rollout/servers_usable"] for step in metrics) == 2
    print("ipc, two servers: seconds of a push:", [round(step["timing/sync"], 3) for step in metrics], flush=True)


@pytest.fixture
def any_model(model: Path) -> Path:
    """The model of NIGHTSHIFT_TEST_LARGE_MODEL, else the small one, whose pushes are all round trips."""
    return Path(os.environ.get("NIGHTSHIFT_TEST_LARGE_MODEL") or model)


def test_a_job_trains_with_weights_sent_by_nccl_and_a_killed_server_is_sent_them_again(
    any_model: Path, tmp_path: Path, nccl: None
) -> None:
    killed: list[int] = []

    def kill(folder: Path, events: list[dict[str, Any]]) -> None:
        if not killed and sum(event["kind"] == "step" for event in events) >= 6:
            (server,) = json.loads((folder / "services.json").read_text())["rollout"]
            assert server["weight_backend"] == "nccl"
            killed.append(server["pid"])
            os.killpg(server["pid"], signal.SIGKILL)

    job = write_job(tmp_path, any_model, STEPS, **SMALL, rollout={**ROLLOUT, "weight_transfer": "nccl"})
    folder, events, output = run_steps(job, STEPS, 300, kill)
    metrics = check(folder, events, output, STEPS)
    size = sum(path.stat().st_size for path in any_model.glob("*.safetensors")) / 1e9
    syncs = [step["timing/sync"] for step in metrics]
    print(f"nccl: seconds of a push of {size:.3f} GB: {[round(seconds, 3) for seconds in syncs]}", flush=True)
    print(f"nccl: {statistics.median(syncs[1:6]) / size:.3f} s/GB, median of the pushes of steps 2 to 6", flush=True)
    assert killed
    back = [event for event in events if event["kind"] == "role" and "holds" in (event.get("detail") or "")]
    print("after the kill:", [event["detail"] for event in back], flush=True)
    assert back, output


def requests(folder: Path, name: str) -> list[str]:
    """Lines of a server's request log."""
    return [
        line for path in (folder / "logs").glob(f"requests-{name}*.jsonl") for line in path.read_text().splitlines()
    ]
