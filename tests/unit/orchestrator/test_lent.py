"""What a run does with the servers that it was lent, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nightshift.config.rollout import FleetUse
from nightshift.wire.lease_file import LeasedServer, Released, forget_leases, read_leases, read_released, write_leases
from orchestrator.runner.lent import Lent

USE = FleetUse(name="night", max_wait_s=60.0)
ENGINE = ("safetensors", {"root": "/weights"})


def server(lease: int, break_off: float | None = None, name: str = "a") -> LeasedServer:
    return LeasedServer(name, f"http://{name}", lease, "secret", break_off)


def test_a_lease_is_used_until_it_is_asked_back_and_let_go_of(tmp_path: Path) -> None:
    lent = Lent(tmp_path, USE, clock=lambda: 100.0)
    assert lent.addresses(*ENGINE) == []
    assert lent.empty
    lent.begin()
    assert read_released(tmp_path) == Released(True)
    write_leases(tmp_path, [server(1), server(2, name="b")])
    first, second = lent.addresses(*ENGINE)
    assert (first.name, first.url, first.token, first.incarnation) == ("a", "http://a", "secret", "lease-1")
    assert (first.weight_backend, first.init_info, first.managed) == (*ENGINE, False)
    assert not lent.empty
    write_leases(tmp_path, [server(1, break_off=107.5), server(2, name="b")])
    assert lent.addresses(*ENGINE) == [second]
    assert lent.patience(first) == 7.5
    assert read_released(tmp_path) == Released(True), "it is still drained"
    lent.left(first)
    assert read_released(tmp_path) == Released(True, frozenset({1}))
    write_leases(tmp_path, [server(2, name="b", break_off=90.0)])
    assert lent.addresses(*ENGINE) == []
    assert (lent.empty, lent.patience(second), lent.patience(first)) == (True, 0.0, 0.0)
    lent.end()
    assert read_released(tmp_path) == Released(False, frozenset({2}))


def test_to_wait_for_a_lease_has_an_end(tmp_path: Path) -> None:
    now = [1000.0]
    lent = Lent(tmp_path, USE, clock=lambda: now[0])
    assert lent.overdue == ""
    lent.begin()
    for later, says in ((1060.0, ""), (1061.0, "fleet 'night' lent the job no server for 61 s")):
        now[0] = later
        lent.addresses(*ENGINE)
        assert lent.overdue.startswith(says)
        assert bool(lent.overdue) == bool(says)
    write_leases(tmp_path, [server(1)])
    lent.addresses(*ENGINE)
    now[0] += 500.0
    lent.addresses(*ENGINE)
    assert lent.overdue == "", "it has a server"
    write_leases(tmp_path, [server(1, break_off=1e12)])
    lent.addresses(*ENGINE)
    assert lent.overdue == "", "the time begins anew"
    now[0] += 61.0
    lent.addresses(*ENGINE)
    assert lent.overdue


def test_one_that_was_asked_back_before_it_was_seen_is_never_used(tmp_path: Path) -> None:
    lent = Lent(tmp_path, USE)
    lent.begin()
    write_leases(tmp_path, [server(5, break_off=1e12)])
    assert lent.addresses(*ENGINE) == []
    assert read_released(tmp_path) == Released(True, frozenset({5}))


def test_another_process_takes_up_what_is_lent_and_not_what_was_asked_back(tmp_path: Path) -> None:
    write_leases(tmp_path, [server(1), server(2, break_off=1e12, name="b")])
    lent = Lent(tmp_path, USE)
    lent.begin()
    assert [address.incarnation for address in lent.addresses(*ENGINE)] == ["lease-1"]
    assert read_released(tmp_path).leases == {2}


def test_a_word_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    lent = Lent(tmp_path, USE)
    blocked = tmp_path / "leases.released.json"
    blocked.mkdir()
    lent.begin()
    assert read_released(tmp_path) == Released()
    blocked.rmdir()
    lent.addresses(*ENGINE)
    assert read_released(tmp_path).wants
    assert not list(tmp_path.glob(".leases*")), "no part of a file is left behind"


@pytest.mark.parametrize("text", ["", "[]", '{"wants": 1, "leases": []}', '{"wants": true, "leases": ["x"]}'])
def test_an_answer_that_is_none_wants_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "leases.released.json").write_text(text)
    assert read_released(tmp_path) == Released()


def test_what_an_earlier_process_left_is_forgotten(tmp_path: Path) -> None:
    write_leases(tmp_path, [server(1)])
    Lent(tmp_path, USE).begin()
    forget_leases(tmp_path)
    forget_leases(tmp_path)
    assert (read_leases(tmp_path), read_released(tmp_path)) == ([], Released())
