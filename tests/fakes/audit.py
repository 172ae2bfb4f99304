"""Audits a run with the real program, and holds what the fake trainer really applied against what was audited."""

from __future__ import annotations

from collections import Counter

import numpy as np

from nightshift.analysis.audit import audit as audit_run
from nightshift.analysis.evidence import load
from nightshift.analysis.findings import Audit
from nightshift.wire.version import Lineage, PolicyVersion
from orchestrator.runner.checkpoints import Checkpoints
from orchestrator.store.state import StateStore
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


def audit(run: FakeRun, *, steps: int, staleness: int | None, weights: bool = True) -> Audit:
    """Checks what must hold of every run that ended.

    Args:
        run: the run.
        steps: updates that lead to its final weights.
        staleness: bound on every token of every sample; None: none.
        weights: also that the final weights are those of the last update.

    Raises:
        AssertionError: something does not hold.
    """
    found = audit_run(load(run.run_dir))
    assert found.balanced, "\n".join(f"{one.kind} {one.subject}: {one.message}" for one in found.findings)
    assert (found.step, found.uncommitted) == (steps, [])
    assert staleness is None or found.oldest <= staleness
    # The program believes the manifests; what the trainer applied is known here, and must be the same.
    updates = final_updates(run)
    assert [update.step for update in updates] == list(range(1, steps + 1))
    assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1))
    applied = [sample for update in updates for sample in update.samples]
    assert len({sample.sample_id for sample in applied}) == len(applied)
    stored = {row["sample_id"]: row for row in run.rollouts()}
    for update in updates:
        for sample in update.samples:
            row = stored[sample.sample_id]
            assert row["step"] == update.step
            assert row["prompt_ids"] == sample.prompt_ids.tolist()
            assert row["response_ids"] == sample.response_ids.tolist()
            assert list(zip(row["versions"], row["version_starts"], strict=True)) == [
                (span.version, span.start) for span in sample.versions
            ]
            assert len(sample.logprobs) == len(sample.response_ids) == len(sample.loss_mask)
    counts = balance(run)
    assert counts["issued"] == sum(count for state, count in counts.items() if state != "issued")
    assert counts.get("trained", 0) == found.accounts["trained"]
    if weights and updates:
        np.testing.assert_array_equal(updates[-1].weights, run.trainer.weights)
    return found
