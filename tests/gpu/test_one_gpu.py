"""The same job on one GPU: a small random model, published inside the device, proved by the probe.

Run where there is a GPU, with a tokenizer's folder in NIGHTSHIFT_TEST_TOKENIZER: pytest -m gpu tests/gpu
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nightshift.gpu import find_device
from tests.gpu.jobs import run_steps, write_job
from tests.gpu.models import build

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert find_device("auto") == "cuda"
    folder = tmp_path_factory.mktemp("model")
    build(folder, "small", Path(os.environ["NIGHTSHIFT_TEST_TOKENIZER"]))
    return folder


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_job_trains_and_publishes_inside_the_gpu(model: Path, tmp_path: Path, staleness: int) -> None:
    job = write_job(
        tmp_path,
        model,
        4,
        data={"max_prompt_length": 64},
        pipeline={"max_staleness": staleness},
        rollout={
            "batch_size": 8,
            "n": 4,
            "max_response_length": 64,
            "min_response_length": 64,
            "kv_cache_gib": 2,
            "max_num_seqs": 64,
        },
        trainer={"max_tokens_per_micro_batch": 2048, "learning_rate": 1e-4},
    )
    folder, events, output = run_steps(job, 4, 240)
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert [event for event in events if event["kind"] == "warning" and "left" not in event["message"]] == [], output
    assert all(step["staleness/max"] <= staleness for step in steps)
    assert steps[0]["log_ratio/abs_mean"] < 0.02
    assert all(step["sync/changed_fraction"] > 0.1 for step in steps)
    # Nothing went through files.
    assert not list((Path("/dev/shm") / f"nightshift-{folder.name}").glob("*.safetensors"))
