"""Audits a run from outside: what the trainer applied, what the engines were asked, what was stored."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from nightshift.wire.experience import Sample
from nightshift.wire.version import Lineage, PolicyVersion
from orchestrator.runner.checkpoints import Checkpoints
from orchestrator.store.state import StateStore
from tests.fakes.requests import Request
from tests.fakes.run import FakeRun
from tests.fakes.trainer import Update


def balance(run: FakeRun) -> dict[str, int]:
    """Terms of the ledger's equation, from the database."""
    store = StateStore(f"sqlite:///{run.run_dir / 'state.db'}")
    try:
        _, records = store.load(run.run_dir.name)
    finally:
        store.close()
    counts = Counter(str(record.state) for record in records)
    return {"issued": len(records), **counts}


def final_lineage(run: FakeRun) -> Lineage:
    """Lineage of the newest checkpoint's weights."""
    checkpoints = Checkpoints(run.run_dir)
    manifest = checkpoints.manifest(checkpoints.committed()[-1])
    branches = tuple((number, step) for number, step in manifest["branches"])
    return Lineage(manifest["run_id"], manifest["lineage"], branches)


def final_updates(run: FakeRun) -> list[Update]:
    """Updates that the final weights come from, in order."""
    lineage = final_lineage(run)
    return [update for update in run.updates if lineage.contains(PolicyVersion.parse(update.new))]


def audit(run: FakeRun, *, steps: int, staleness: int | None, weights: bool = True) -> None:
    """Checks what must hold of every run that ended.

    Args:
        run: the run.
        steps: updates that lead to its final weights.
        staleness: bound on every token of every sample; None: none.
        weights: also that the final weights are those of the last update.

    Raises:
        AssertionError: something does not hold.
    """
    updates = final_updates(run)
    assert [update.step for update in updates] == list(range(1, steps + 1))
    assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1))
    asked: dict[str, list[Request]] = defaultdict(list)  # by sample
    for request in run.samples():
        asked[request.request_id.rpartition(".")[0]].append(request)
    trained: set[str] = set()
    for update in updates:
        slots = Counter(sample.group_id for sample in update.samples)
        assert all(count <= run.spec.rollout.n for count in slots.values())
        for sample in update.samples:
            assert sample.sample_id not in trained, f"{sample.sample_id} was trained twice"
            trained.add(sample.sample_id)
            _check_sample(run, sample, asked, update, staleness)
    groups = {sample_id.rpartition(".")[0] for sample_id in trained}
    counts = balance(run)
    assert counts["issued"] == sum(count for state, count in counts.items() if state != "issued")
    assert counts.get("trained", 0) >= len(groups)
    stored = {row["sample_id"]: row for row in run.rollouts()}
    assert trained <= stored.keys()
    for update in updates:
        for sample in update.samples:
            assert stored[sample.sample_id]["response_ids"] == sample.response_ids.tolist()
            assert stored[sample.sample_id]["step"] == update.step
    if weights and updates:
        np.testing.assert_array_equal(updates[-1].weights, run.trainer.weights)


def _check_sample(
    run: FakeRun, sample: Sample, asked: dict[str, list[Request]], update: Update, staleness: int | None
) -> None:
    sources = asked[f"{run.run_dir.name}.{sample.sample_id}"]
    whole = sample.prompt_ids.tolist() + sample.response_ids.tolist()
    # A later attempt may go on behind what an earlier one drew: its prompt holds those tokens.
    assert any(request.prompt_ids + request.tokens == whole for request in sources), "trained ids were never sampled"
    assert min(sources, key=lambda request: request.time).prompt_ids == sample.prompt_ids.tolist()
    assert len(sample.logprobs) == len(sample.response_ids) == len(sample.loss_mask)
    for span in sample.versions:
        age = update.step - 1 - PolicyVersion.parse(span.version).step
        assert age >= 0
        assert staleness is None or age <= staleness, f"{sample.sample_id}: a token is {age} versions old"
