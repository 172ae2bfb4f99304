"""A job on preference pairs through the service: uploaded, planned, accepted, and run between fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nightshift.wire.events import read_events
from tests.fakes.service import Api, digest, serve
from tests.fixtures.tokenizer_k import write_folder

COMMAND = [sys.executable, "-m", "tests.fakes.session_process", "{folder}"]
STEPS = 4


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


TRAIN = lines(*({"prompt": f"word {at}?", "chosen": str(at), "rejected": "x"} for at in range(6)))
TEST = lines(*({"prompt": f"word {at}!", "chosen": str(at), "rejected": "y"} for at in range(3)))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's process finds the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def pairs(model: Path, train: bytes = TRAIN, **algorithm: Any) -> dict[str, Any]:
    """A DPO job whose files are uploads."""
    return {
        "name": "pairs",
        "model": {"path": str(model)},
        "data": {
            "train_files": [f"upload:{digest(train)}/pairs.jsonl"],
            "test_files": [f"upload:{digest(TEST)}/held_out.jsonl"],
            "max_prompt_length": 64,
        },
        "algorithm": {"policy_loss": "dpo", "kl_coef": 0.0, **algorithm},
        "rollout": {"batch_size": 2, "max_response_length": 8},
        "trainer": {"total_steps": STEPS, "learning_rate": 0.5, "test_freq": 2},
        "scorers": {"batch_wait_ms": 1.0},
        "tracking": {"tensorboard": False},
    }


def write_model(folder: Path) -> Path:
    """The tokenizer and configuration of the fakes, with a file of weights, whose size the plan reads."""
    write_folder(folder)
    save_file({"model.embed_tokens.weight": np.zeros((64, 16), np.float32)}, folder / "model.safetensors")
    return folder


async def upload(api: Api, *files: bytes) -> None:
    for data in files:
        response = await api.http.put(f"/v1/uploads/{digest(data)}", content=data)
        assert response.status_code in (200, 201), response.text


async def test_pairs_are_uploaded_planned_and_trained_on(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "tiny")
    async with serve(tmp_path / "service", command=COMMAND, allowed=[tmp_path / "models"]) as api:
        document = pairs(model)
        missing = await api.http.post("/v1/jobs", json=document)
        assert missing.status_code == 422
        assert "data.train_files[0]" in missing.text  # the data were not uploaded yet
        await upload(api, TRAIN, TEST)
        planned = await api.http.post("/v1/plan", json=document)
        assert planned.status_code == 200, planned.text
        plan = planned.json()
        assert plan["data"]["train"]["summary"] == "6 pairs of 6 rows"
        assert (plan["samples_per_step"], plan["kv_cache_tokens"]) == (4, None)  # two pairs; nothing is sampled
        assert "reference" in plan["memory"]
        assert "rollout" not in plan["memory"]
        made = await api.submit(document)
        done = await api.wait(made["id"], "succeeded", "failed")
        assert (done["state"], done["step"], done["error"]) == ("succeeded", STEPS, "")
        base = f"/v1/jobs/{made['id']}"
        history = (await api.http.get(f"{base}/metrics-history", params={"name": "loss/actor"})).json()
        assert [point["step"] for point in history["points"] if point["kind"] == "train"] == [1, 2, 3, 4]
        folder = Path(api.service.jobs.get(made["id"]).run_dir)
        evaluations = [e["metrics"] for e in read_events(folder / "events.jsonl") if e["kind"] == "evaluation"]
        assert [metrics["eval/prompts"] for metrics in evaluations] == [3.0] * 3  # before, at 2 and at the end
        assert all("eval/margin" in metrics for metrics in evaluations)
        checkpoints = (await api.http.get(f"{base}/checkpoints")).json()["checkpoints"]
        assert STEPS in [checkpoint["step"] for checkpoint in checkpoints]


async def test_data_without_pairs_and_options_of_another_loss_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "tiny")
    prompts = lines({"prompt": "word?"})
    async with serve(tmp_path / "service", command=COMMAND, allowed=[tmp_path / "models"]) as api:
        await upload(api, TRAIN, TEST, prompts)
        refused = await api.http.post("/v1/jobs", json=pairs(model, importance_cap=2.0))
        assert refused.status_code == 422
        assert "importance_cap" in refused.text
        made = await api.submit(pairs(model, prompts))
        failed = await api.wait(made["id"], "succeeded", "failed")
        assert failed["state"] == "failed"
        assert "chosen" in failed["error"]
