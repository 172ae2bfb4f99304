"""Ages of what was trained on."""

from __future__ import annotations

from typing import Any

from nightshift.analysis.staleness import Staleness, staleness


def row(group: str, trained: str, versions: list[str], starts: list[int], tokens: int) -> dict[str, Any]:
    return {
        "step": 5,
        "group_id": group,
        "trained_version": trained,
        "versions": versions,
        "version_starts": starts,
        "response_tokens": tokens,
    }


def test_a_sample_is_as_old_as_its_oldest_token_and_a_group_as_its_oldest_sample() -> None:
    found = staleness(
        [
            row("a", "run/0/4", ["run/0/2", "run/0/3"], [0, 6], 10),
            row("a", "run/0/4", ["run/0/4"], [0], 3),
            row("b", "run/1/4", ["run/0/3"], [0], 2),
        ]
    )
    assert found == Staleness(groups={1: 1, 2: 1}, samples={0: 1, 1: 1, 2: 1}, tokens={0: 3, 1: 6, 2: 6}, unknown=0)
    assert (found.most, found.mean) == (2, 1.0)


def test_samples_without_versions_are_unknown_and_not_fresh() -> None:
    found = staleness([row("a", "run/0/4", [], [], 2), row("a", "run/0/4", [""], [0], 2), {"step": 1}])
    assert found == Staleness(unknown=3)
    assert (found.most, found.mean) == (None, None)


def test_tokens_are_not_guessed_where_spans_have_no_starts() -> None:
    found = staleness([{"step": 1, "group_id": "a", "trained_version": "r/0/1", "versions": ["r/0/0"]}])
    assert (found.samples, found.tokens) == ({1: 1}, {})
