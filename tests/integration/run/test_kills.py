"""One kill -9 of each kind of process in a deterministic job: it completes, and not a bit of its weights is another."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.real import Matrix
from tests.chaos.victims import VICTIMS
from tests.integration.run.jobs import Finished
from tests.integration.run.shared import STEPS, deterministic_job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


def test_killing_each_process_changes_no_bit(deterministic: Finished, tiny_model: Path, tmp_path: Path) -> None:
    seed = 7
    order = Random(seed).sample(sorted(VICTIMS), len(VICTIMS))
    job = deterministic_job(tmp_path, tiny_model)
    outcome, killed = Matrix(job, STEPS, seed, pace_s=0.1, limit_s=900.0, within_s=2.0).run(order)
    assert [one.victim for one in outcome.kills] == order
    said = {(event["role"], event["state"]) for event in killed.of_kind("role")}
    assert {(role, state) for role in ("rollout", "trainer") for state in ("restarting", "ready")} <= said
    assert ("orchestrator", "restarting") in said
    lineages = [event["lineage"] for event in killed.of_kind("job") if "lineage" in event]
    assert lineages == sorted(lineages)
    assert len(set(lineages)) >= 3, "a killed rank and a killed orchestrator each begin another one"
    before, after = load_file(deterministic.weights(STEPS)), load_file(killed.weights(STEPS))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    rewards, again = (
        {(event["step"], event["metrics"]["reward/mean"]) for event in one.of_kind("step")}
        for one in (deterministic, killed)
    )
    assert again == rewards, "a step that is made again has the same rewards"
