"""500 random moments of runs with simulated services and a real runner: each run ends, and its books balance.

The seeds are printed; ``NIGHTSHIFT_CHAOS_SEED`` chooses the first one.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.storm import Weather, blow_all

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

PARTS, MOMENTS = 10, 50
_FIRST = int(os.environ.get("NIGHTSHIFT_CHAOS_SEED", "0"))
_AT_ONCE, _PER_RUN = 5, 6


@pytest.mark.parametrize("part", range(PARTS))
async def test_random_moments(tmp_path: Path, part: int) -> None:
    seed, weathers = _FIRST + 1000 * part, list[Weather]()
    while sum((weather.kills for weather in weathers), Counter()).total() < MOMENTS:
        weathers += await blow_all(tmp_path, range(seed, seed + _AT_ONCE), _PER_RUN, _AT_ONCE)
        seed += _AT_ONCE
    kills = sum((weather.kills for weather in weathers), Counter())
    print(f"part {part}: {len(weathers)} runs, {kills.total()} kills: {dict(kills)}")
    assert set(kills) == {"engine", "scorers", "trainer", "orchestrator"}
