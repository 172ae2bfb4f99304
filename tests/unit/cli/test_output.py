"""What every command has in common: JSON for programs, and a word where it takes long."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from nightshift.cli.main import app
from nightshift.cli.output import waiting


class Terminal(io.StringIO):
    """Text that goes to a terminal; says when some has come."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.wrote.set()
        return super().write(text)


def test_what_takes_long_says_so_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with waiting("reading", after_s=0.01):
        assert terminal.wrote.wait(30)
    said = terminal.getvalue()
    assert said.startswith("\rreading: ")
    assert said.endswith("\r")
    assert said.split("\r")[-2].strip() == "", "its line is empty again"


def test_what_is_quick_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with waiting("reading", after_s=60):
        pass
    assert terminal.getvalue() == ""


def test_no_word_to_what_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with waiting("reading", after_s=0):
        pass
    assert stream.getvalue() == ""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands, by the words that call them."""
    below = getattr(command, "commands", {})
    if not below:
        yield path, command
    for name, inner in below.items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize(("path", "command"), list(commands(typer.main.get_command(app))))
def test_every_command_has_json(path: tuple[str, ...], command: Any) -> None:
    assert "--json" in {option for parameter in command.params for option in parameter.opts}, path
