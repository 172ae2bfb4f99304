"""A run from the first prompt to the last checkpoint, against services that speak the real contracts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.run import FakeRun


@pytest.mark.parametrize("staleness", [0, 1, 2, None])
async def test_a_run_ends_well(tmp_path: Path, staleness: int | None) -> None:
    async with FakeRun(tmp_path, pipeline={"max_staleness": staleness, "max_groups_in_flight": 6}) as run:
        assert await run.run() == 0, run.error()
