"""A few random moments of a run, of the 500 in tests/chaos: services and runner are killed, and the books balance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.storm import blow_all


async def test_what_dies_at_random_loses_and_doubles_nothing(tmp_path: Path) -> None:
    weathers = await blow_all(tmp_path, (0, 1, 2, 4), moments=5, at_once=4)
    kills = sum((weather.kills for weather in weathers), Counter())
    assert kills.total() >= 8
    assert kills["orchestrator"]
    assert any(weather.deterministic for weather in weathers)
    assert all(weather.requests for weather in weathers)
