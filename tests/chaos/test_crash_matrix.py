"""Ten kills of each kind of process at random moments of one long job with the real parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.matrix import run_job
from tests.chaos.victims import VICTIMS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("NIGHTSHIFT_CHAOS_KILLS", "10"))
SEED = int(os.environ.get("NIGHTSHIFT_CHAOS_SEED", "0"))


@pytest.mark.parametrize("name", VICTIMS)
def test_the_job_completes_and_its_books_balance(tmp_path: Path, name: str) -> None:
    outcome = run_job(tmp_path, [name], KILLS, SEED, limit_s=800)
    assert len(outcome.kills) == KILLS
    assert outcome.audit["balanced"]
    lost_weights = {"rank", "orchestrator"}  # after which the run goes back to a checkpoint, in a new lineage
    # A runner that dies before the first checkpoint has its trainer replaced, which is one more.
    more = 1 if name == "orchestrator" else 0
    assert 0 <= outcome.audit["lineage"] - (KILLS if name in lost_weights else 0) <= more
