"""Requests for another start of a server: taken once, by the start that is meant."""

from __future__ import annotations

from pathlib import Path

from nightshift.wire.restart_request import ask_restart, take_restart


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    assert take_restart(tmp_path, "rollout-0", "a") is None
    ask_restart(tmp_path, "rollout-0", "a", "drew no token")
    assert take_restart(tmp_path, "rollout-1", "a") is None
    assert take_restart(tmp_path, "rollout-0", "a") == "drew no token"
    assert take_restart(tmp_path, "rollout-0", "a") is None
    assert list(tmp_path.iterdir()) == []


def test_a_request_for_an_earlier_start_does_no_harm(tmp_path: Path) -> None:
    ask_restart(tmp_path, "rollout-0", "a", "drew no token")
    assert take_restart(tmp_path, "rollout-0", "b") is None
    assert take_restart(tmp_path, "rollout-0", "a") is None


def test_a_later_request_replaces_an_earlier_one(tmp_path: Path) -> None:
    ask_restart(tmp_path, "rollout-0", "a", "first")
    ask_restart(tmp_path, "rollout-0", "b", "second")
    assert take_restart(tmp_path, "rollout-0", "b") == "second"


def test_what_is_no_request_is_removed(tmp_path: Path) -> None:
    for text in ("", "[]", '{"incarnation": 1}', "\x00"):
        (tmp_path / "restart-rollout-0.json").write_text(text)
        assert take_restart(tmp_path, "rollout-0", "1") is None
        assert list(tmp_path.iterdir()) == []
