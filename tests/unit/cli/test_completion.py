"""Completion as shells ask for it: the program is called with the words so far in its environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nightshift.cli import completion
from nightshift.config.live import LIVE
from orchestrator.jobs.states import JobState
from orchestrator.store.access import Scope
from tests.fixtures.quickstart import ROOT, tools


def ask(shell: str, line: str, folder: Path) -> list[str]:
    """What a shell would offer behind these words, the last of which may be unfinished."""
    words = line.split(" ")
    variables = {
        "_NIGHTSHIFT_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "NIGHTSHIFT_URL": "",
        "PYTHONPATH": str(ROOT),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NIGHTSHIFT_")} | variables
    done = subprocess.run(
        [sys.executable, "-m", "nightshift.cli.main"],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("shell", "line", "word"),
    [
        ("bash", "nightshift sub", "submit"),
        ("zsh", "nightshift submit --pri", "--priority"),
        ("fish", "nightshift list --state que", "queued"),
        ("bash", "nightshift token ci --scope su", "submit"),
        ("zsh", "nightshift run job.yaml trainer.total_st", "trainer.total_steps="),
        ("fish", "nightshift set job rollout_b", "rollout_batch_size="),
        ("bash", "nightshift watch fir", "first-1"),
    ],
)
def test_commands_options_and_values_are_completed(shell: str, line: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first-1").mkdir(parents=True)
    (tmp_path / "runs" / "first-1" / "job.yaml").write_text("name: first\n")
    offered = ask(shell, line, tmp_path)
    assert any(word in item for item in offered)
    assert not any("pause" in item for item in offered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str, tmp_path: Path) -> None:
    environment = os.environ | {"_NIGHTSHIFT_COMPLETE": f"source_{shell}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "nightshift.cli.main"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert f"complete_{shell}" in done.stdout
    assert "nightshift" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_itself_takes_the_script(tmp_path: Path) -> None:
    text = """
    source <(_NIGHTSHIFT_COMPLETE=source_bash nightshift)
    COMP_WORDS=(nightshift led) COMP_CWORD=1
    _nightshift_completion nightshift
    echo "${COMPREPLY[*]}"
    """
    environment = os.environ | {"PATH": tools(tmp_path / "bin"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.split() == ["ledger"]


def test_what_is_offered_is_what_there_is() -> None:
    assert sorted(completion.STATES) == sorted(JobState)
    assert sorted(completion.SCOPES) == sorted(Scope)
    assert {f"{key}=" for key in LIVE} <= {name for name, _ in completion.settings("")}
    assert completion.overrides("rollout.temp") == ["rollout.temperature="]
    assert completion.overrides("nam") == ["name="]
