"""Two real jobs with different policies on two real servers at once, submitted from a folder that is gone by then: each
stored token's version belongs to its own job, and its log-prob to that job's policy."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from nightshift.wire.events import read_events
from tests.fakes.up import Up
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import leftovers, write_job

pytestmark = pytest.mark.integration
_TEMPERATURE = 0.8
#: Nats per token in the mean; two policies of the tiny model are nats apart.
_SAME, _OTHER = 0.05, 0.3


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """All stored samples of a run."""
    return [row for path in sorted((run_dir / "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def distance(model: Path, rows: list[dict[str, Any]]) -> float:
    """Mean absolute difference between stored log-probs and those of a model, in nats per token."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / _TEMPERATURE
        chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]
        found.append(np.abs(chosen.numpy() - np.array(row["logprobs"])))
    return float(np.concatenate(found).mean())


def test_each_token_belongs_to_the_policy_of_its_own_job(tmp_path: Path) -> None:
    models = [build_tiny_model(tmp_path / f"model-{seed}", seed) for seed in (0, 1)]
    with (
        Up(tmp_path / "data", "--at-once", "2", *(x for m in models for x in ("--allow-path", str(m))), command=None)
        as up,
        up.client() as client,
    ):  # fmt: skip
        made = []
        for at, model in enumerate(models):
            job = write_job(
                tmp_path / "mine", model, name=f"job-{at}", rollout={"dtype": "float32"},
                trainer={"total_steps": 6, "seed": at},
                rewards=[{"function": f"reward.py:{('score', 'inverted')[at]}"}],
            )  # fmt: skip
            made.append(client.submit(job).id)
            shutil.rmtree(tmp_path / "mine")
        done = [client.wait(job_id, 500) for job_id in made]
        for job in done:
            assert job.state == "succeeded", f"{job.error}: {client.logs(job.id, 'job')[-2000:]}"
            assert job.step == 6
        spans = []
        for at, job_id in enumerate(made):
            run_dir = up.folder / "runs" / job_id
            rows = rows_of(run_dir)
            assert len(rows) == 6 * 2 * 4
            for row in rows:
                assert row["version_starts"][0] == 0, "each token has a version"
                assert {version.split("/")[0] for version in row["versions"]} == {job_id}
                assert len(row["logprobs"]) == len(row["response_ids"]) > 0
            first = [row for row in rows if [version.rsplit("/", 1)[1] for version in row["versions"]] == ["0"]]
            assert len(first) >= 8, "the first batch was drawn from the model as it came"
            assert distance(models[at], first) < _SAME
            assert distance(models[1 - at], first) > _OTHER, "the other job's policy would be seen"
            assert client.ledger(job_id)["balanced"]
            up.cli("audit", str(run_dir))
            times = [event["time"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "job"]
            spans.append((min(times), max(times)))
        assert max(begin for begin, _ in spans) < min(end for _, end in spans), "both ran at once"
    deadline = time.monotonic() + 60
    while (left := [item for job_id in made for item in leftovers(job_id)]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []
