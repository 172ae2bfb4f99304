"""``nightshift.Trainer`` embedded, on the real parts: the loop of the design with the tiny model."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from nightshift import Trainer
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import LETTERS, ROOT, leftovers

pytestmark = pytest.mark.integration


def test_the_loop_of_the_design_on_real_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = build_tiny_model(tmp_path / "model")
    reward = ROOT / "tests" / "integration" / "run" / "reward.py"
    sections = {
        "data": {"max_prompt_length": 48},
        "rollout": {
            "n": 4, "max_response_length": 12, "temperature": 0.8, "kv_cache_gib": 0.05, "max_num_seqs": 16,
        },
        "trainer": {"learning_rate": 1e-3, "micro_batch_size": 4},
        "tracking": {"tensorboard": False},
        "resources": {"device": "cpu"},
    }  # fmt: skip
    batches = [
        [{"prompt": f"{at} {letter}", "ground_truth": letter} for letter in LETTERS[2 * at : 2 * at + 2]]
        for at in range(4)
    ]
    with Trainer(actor_model=str(model), reward_model=f"{reward}:score", config=sections) as trainer:
        trainer.config.rollout_batch_size = 2
        trainer.debug_mode = True
        losses = []
        for at, batch in enumerate(batches[:2]):
            outputs = trainer.rollout(batch)
            assert len(outputs) == 8
            loss = trainer.compute_loss(outputs)
            before = float(loss)
            assert trainer.job is not None
            assert trainer.job.step <= at, "reading a loss makes no step"
            trainer.step(loss)
            assert math.isfinite(before)
            assert float(loss) == pytest.approx(before, rel=1e-4, abs=1e-7)
            assert trainer.job is not None
            assert {output.weight_versions[0].split("/")[::2] == [trainer.job.id, str(at)] for output in outputs} == {
                True
            }
            losses.append(loss)
            trainer.config.learning_rate = 5e-4
        assert [loss.metrics["lr"] for loss in losses] == [1e-3, 5e-4]
        first, second = losses[0].batch[0], losses[1].batch[0]
        assert first.peak_memory is None
        assert second.peak_memory > 1 << 20
        assert first.tokens_generated == len(first.response_ids) == len(first.logprobs) > 0
        assert (first.logprobs <= 0).all()
        assert first.reward is not None
        assert first.reward_latency > 0
        assert np.isfinite(losses[0].batch.rewards).all()
        ages = []
        for outputs in trainer.rollouts(batches[2:]):
            step = 2 + len(ages)
            ages.append(step - min(int(output.weight_versions[0].rsplit("/", 1)[1]) for output in outputs))
            trainer.step(trainer.compute_loss(outputs))
        assert ages == [0, 1], "the next batch ran while the step before it was made"
        deadline = time.monotonic() + 60
        while (job := trainer.job).step < 4:  # the service reads it from the run's events
            assert time.monotonic() < deadline, job
            time.sleep(0.2)
        assert (job.state, job.step) == ("running", 4)
        found = {(item["role"], item["name"]): item for item in trainer.tensors(1)}
        assert found["rollout", "response_ids"]["dtype"] == "int32"
        inside = found["trainer", "logprobs"]
        assert (inside["dtype"], inside["device"]) == ("float32", "cpu")
        assert sum(found["rollout", "logprobs"]["shapes"].values()) == 8
        folder = trainer.save(tmp_path / "out")
        assert trainer.job.state == "succeeded"
    trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert any((trained[name] != before[name]).any() for name in before)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64
    deadline = time.monotonic() + 60
    while (left := leftovers(job.id)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []
