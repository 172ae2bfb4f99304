"""One kill -9 of each kind of process in a deterministic job: it completes, and not a bit of its weights is another."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.real import Matrix, write_chaos_job
from tests.chaos.victims import VICTIMS
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

STEPS = 18
DETERMINISTIC = {"max_staleness": 0, "deterministic": True}


def test_killing_each_process_changes_no_bit(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    settings = {"steps": STEPS, "save_freq": 2, "pipeline": DETERMINISTIC}
    calm = run(write_chaos_job(tmp_path / "calm", model, **settings))
    assert calm.code == 0, calm.output
    seed = 7
    order = Random(seed).sample(sorted(VICTIMS), len(VICTIMS))
    job = write_chaos_job(tmp_path / "killed", model, **settings)
    outcome, killed = Matrix(job, STEPS, seed, pace_s=0.1, limit_s=900.0).run(order)
    assert [one.victim for one in outcome.kills] == order
    said = {(event["role"], event["state"]) for event in killed.of_kind("role")}
    assert {(role, state) for role in ("rollout", "trainer") for state in ("restarting", "ready")} <= said
    assert ("orchestrator", "restarting") in said
    lineages = [event["lineage"] for event in killed.of_kind("job") if "lineage" in event]
    assert lineages == sorted(lineages)
    assert len(set(lineages)) >= 3, "a killed rank and a killed orchestrator each begin another one"
    before, after = load_file(calm.weights(STEPS)), load_file(killed.weights(STEPS))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
