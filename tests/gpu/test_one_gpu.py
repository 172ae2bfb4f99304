"""The same job on one GPU: a small random model, published inside the device, proved by the probe.

Run where there is a GPU, with a tokenizer's folder in NIGHTSHIFT_TEST_TOKENIZER: pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.cli.rollouts import read_rollouts
from tests.gpu.jobs import run_steps, run_whole, write_job

pytestmark = pytest.mark.gpu


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


SMALL: dict[str, Any] = {
    "data": {"max_prompt_length": 64},
    "pipeline": {"max_staleness": 0, "deterministic": True},
    "rollout": {
        "batch_size": 4,
        "n": 4,
        "max_response_length": 32,
        "min_response_length": 32,
        "kv_cache_gib": 2,
        "max_num_seqs": 64,
    },
    "trainer": {"max_tokens_per_micro_batch": 2048, "learning_rate": 1e-5, "save_freq": 2},
    "checkpoint": {"keep": None, "export": False},
}


def samples(folder: Path, step: int) -> dict[str, tuple[list[int], np.ndarray]]:
    """Ids and behaviour log-probs of a step's samples."""
    rows = read_rollouts(folder / "rollouts", step)
    return {row["sample_id"]: (row["response_ids"], np.array(row["logprobs"])) for row in rows}


def test_deterministic_runs_draw_the_same_ids_and_a_resumed_one_goes_on_with_them(model: Path, tmp_path: Path) -> None:
    """Kernels of a GPU sum in no fixed order, so that after an update log-probs agree to bfloat16's precision only."""
    whole = write_job(tmp_path / "whole", model, 4, **SMALL)
    run_whole(whole, tmp_path / "whole" / "run")
    parts = write_job(tmp_path / "parts", model, 4, **SMALL)
    run_whole(parts, tmp_path / "parts" / "run", "trainer.total_steps=2")
    run_whole(parts, tmp_path / "parts" / "run")
    shares = []
    for step in (1, 2, 3, 4):
        one, other = samples(tmp_path / "whole" / "run", step), samples(tmp_path / "parts" / "run", step)
        assert one.keys() == other.keys()
        assert len(one) == 16
        same = [name for name in one if one[name][0] == other[name][0]]
        shares.append(len(same) / len(one))
        assert all(np.abs(one[name][1] - other[name][1]).max() < 0.1 for name in same)
    print("share of samples with the same ids, by step:", shares)
    assert shares[0] == 1.0
    assert min(shares) >= 0.5
