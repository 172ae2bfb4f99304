"""What ``run`` does with its processes, shown on small ones that play the runner and the agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nightshift.wire.events import read_events

ROOT = Path(__file__).resolve().parents[3]

DRIVER = """
import json, sys
from pathlib import Path
from rich.console import Console
from nightshift.cli.run import Deadlines, Supervisor
from nightshift.config import JobSpec

run_dir, store, commands = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
spec = JobSpec.model_validate({
    "name": "t", "model": {"path": "m"}, "data": {"train_files": ["x"]}, "rewards": [{"function": "a.py:f"}],
    "resources": {"weight_store": store, "ports": {"otlp": 1}},
})
deadlines = Deadlines(interrupt=20, runner=1.0, agent=2.0, sweep=10)
code, view = Supervisor(spec, run_dir, commands=commands, deadlines=deadlines).run(Console(), as_json=False)
(run_dir / "result.json").write_text(json.dumps({"code": code, "failure": view.failure, "step": view.step}))
"""

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from nightshift.wire.events import EventLog
run_dir = Path({run_dir!r})
events = EventLog(run_dir / "events.jsonl", run_dir.name)
def until(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            sys.exit("never saw " + str(path))
        time.sleep(0.01)
"""

#: Works until it is told to end, and says so.
AGENT = """
signal.signal(signal.SIGTERM, lambda *_: (run_dir / "agent-ended").touch() or sys.exit(0))
(run_dir / "agent-ready").touch()
while True:
    time.sleep(0.05)
"""
RUNNER = """
until(run_dir / "agent-ready")
events.append("job", state="running", steps=2)
for step in (1, 2):
    events.append("step", step=step, steps=2, metrics={"reward/mean": 0.5})
events.append("job", state="succeeded")
"""


@dataclass
class Fake:
    """A run folder and the processes that play in it."""

    folder: Path
    driver: subprocess.Popen[str]

    def result(self, timeout: float = 60) -> dict[str, Any]:
        out, _ = self.driver.communicate(timeout=timeout)
        assert (self.folder / "result.json").exists(), out
        return {**json.loads((self.folder / "result.json").read_text()), "out": out}

    def wait_for(self, name: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"{name} never appeared"
            time.sleep(0.01)

    def warnings(self) -> list[str]:
        return [event["message"] for event in read_events(self.folder / "events.jsonl") if event["kind"] == "warning"]

    def left(self) -> list[str]:
        """Processes that carry the run's id."""
        mark = f"NIGHTSHIFT_RUN_ID={self.folder.name}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if mark in (entry / "environ").read_bytes().split(b"\0") and state not in "ZX":
                        found.append(entry.name)
                except OSError:
                    continue
        return found


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., Fake]]:
    folder = tmp_path / f"t-{os.getpid()}-{time.time_ns()}"
    (folder / "logs").mkdir(parents=True)
    store = tmp_path / "store"
    store.mkdir()
    drivers: list[subprocess.Popen[str]] = []

    def start(runner: str = RUNNER, agent: str = AGENT) -> Fake:
        prelude = PRELUDE.format(run_dir=str(folder))
        commands = {
            role: [sys.executable, "-c", prelude + textwrap.dedent(body)]
            for role, body in (("orchestrator", runner), ("agent", agent))
        }
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), str(store), json.dumps(commands)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        drivers.append(driver)
        return Fake(folder, driver)

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()


def test_run_ends_with_the_runner_and_the_agent_is_told_to_end(play: Callable[..., Fake]) -> None:
    fake = play()
    result = fake.result()
    assert result["code"] == 0
    assert result["step"] == 2
    assert "step 2/2  reward 0.500" in result["out"]
    assert (fake.folder / "agent-ended").exists()
    assert fake.left() == []
    assert fake.warnings() == []
    (memory,) = [event for event in read_events(fake.folder / "events.jsonl") if event["kind"] == "memory"]
    assert memory["peak_mib"] > 0
    assert "cli" in memory["by_role"]


def test_agent_that_fails_gives_its_sentence_and_its_code(play: Callable[..., Fake]) -> None:
    agent = """
    (run_dir / "agent-ready").touch()
    events.append("role", role="reward", state="failed", detail="no function 'score' in reward.py", fix="Write it")
    sys.exit(2)
    """
    runner = """
    signal.signal(signal.SIGTERM, lambda *_: events.append("job", state="interrupted") or sys.exit(130))
    until(run_dir / "never")
    """
    fake = play(runner=runner, agent=agent)
    result = fake.result()
    assert result["code"] == 2
    assert result["failure"] == "[reward] no function 'score' in reward.py. Write it"
    assert fake.left() == []


def test_agent_that_dies_in_silence_is_quoted_from_its_log(play: Callable[..., Fake]) -> None:
    fake = play(runner="until(run_dir / 'never')", agent="raise RuntimeError('no core is free')")
    result = fake.result()
    assert result["code"] == 1
    assert "[agent] ended with code 1: RuntimeError: no core is free" in result["failure"]
    assert "agent.log" in result["failure"]


def test_failed_job_gives_its_own_sentence(play: Callable[..., Fake]) -> None:
    runner = """
    until(run_dir / "agent-ready")
    events.append("role", role="rollout", state="failed", detail="gone")
    events.append("job", state="failed", error={"role": "trainer", "message": "rank 0 died", "fix": "Give it memory"})
    sys.exit(1)
    """
    result = play(runner=runner).result()
    assert (result["code"], result["failure"]) == (1, "[trainer] rank 0 died. Give it memory")


def test_runner_that_is_killed_goes_on_beside_the_services(play: Callable[..., Fake]) -> None:
    runner = """
    until(run_dir / "agent-ready")
    if "--resume" not in sys.argv:
        events.append("step", step=1, steps=2, metrics={})
        os.kill(os.getpid(), 9)
    events.append("job", state="running", steps=2, step=1)
    events.append("step", step=2, steps=2, metrics={})
    events.append("job", state="succeeded")
    """
    fake = play(runner=runner)
    result = fake.result()
    assert (result["code"], result["step"], result["failure"]) == (0, 2, "")
    assert "orchestrator" in result["out"]
    assert "it was ended by signal SIGKILL" in result["out"]
    assert (fake.folder / "agent-ended").exists()
    assert fake.left() == []


def test_runner_that_keeps_being_killed_is_named_with_the_signal(play: Callable[..., Fake]) -> None:
    fake = play(runner="until(run_dir / 'agent-ready'); os.kill(os.getpid(), 9)")
    result = fake.result()
    restarts = [e for e in read_events(fake.folder / "events.jsonl") if e.get("state") == "restarting"]
    assert len(restarts) == 2
    assert result["code"] == 1
    assert "[orchestrator] was ended by signal SIGKILL" in result["failure"]
    assert fake.left() == []


def test_ctrl_c_lets_the_runner_save_and_ends_with_130(play: Callable[..., Fake]) -> None:
    runner = """
    def save(*_):
        events.append("checkpoint", step=1, path="checkpoints/actor/global_step_1")
        events.append("job", state="interrupted")
        sys.exit(130)
    signal.signal(signal.SIGINT, save)
    until(run_dir / "agent-ready")
    events.append("step", step=1, steps=2, metrics={})
    (run_dir / "stepping").touch()
    time.sleep(60)
    """
    fake = play(runner=runner)
    fake.wait_for("stepping")
    fake.driver.send_signal(signal.SIGINT)
    result = fake.result()
    assert result["code"] == 130
    assert "saving a checkpoint" in result["out"]
    assert "checkpoint: checkpoints/actor/global_step_1" in result["out"]
    assert (fake.folder / "agent-ended").exists()
    assert fake.left() == []


def test_second_ctrl_c_ends_at_once(play: Callable[..., Fake]) -> None:
    stubborn = """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: (run_dir / "asked").touch())
    until(run_dir / "agent-ready")
    (run_dir / "stepping").touch()
    while True:
        time.sleep(0.05)
    """
    agent = stubborn.replace('until(run_dir / "agent-ready")', '(run_dir / "agent-ready").touch()')
    fake = play(runner=stubborn, agent=agent)
    fake.wait_for("stepping")
    fake.driver.send_signal(signal.SIGINT)
    fake.wait_for("asked")
    fake.driver.send_signal(signal.SIGINT)
    assert fake.result()["code"] == 130
    assert fake.left() == []


def test_sigterm_counts_as_ctrl_c(play: Callable[..., Fake]) -> None:
    fake = play(runner="until(run_dir / 'agent-ready'); (run_dir / 'stepping').touch(); time.sleep(60)")
    fake.wait_for("stepping")
    fake.driver.send_signal(signal.SIGTERM)
    assert fake.result()["code"] == 130
    assert fake.left() == []


def test_agent_that_does_not_end_is_killed_after_its_deadline(play: Callable[..., Fake]) -> None:
    agent = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run_dir / "agent-ready").touch()
    while True:
        time.sleep(0.05)
    """
    fake = play(agent=agent)
    assert fake.result()["code"] == 0
    assert fake.left() == []
    assert fake.warnings() == ["did not end within 2 s and was killed"]


def test_what_the_agent_leaves_behind_is_swept_up_and_reported(play: Callable[..., Fake]) -> None:
    agent = """
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    store = run_dir.parent / "store" / f"nightshift-{run_dir.name}"
    store.mkdir()
    (store / "1.safetensors").write_bytes(b"x" * 10)
    (run_dir / "agent-ready").touch()
    while True:
        time.sleep(0.05)
    """
    fake = play(agent=agent)
    assert fake.result()["code"] == 0
    assert fake.left() == []
    assert list((fake.folder.parent / "store").iterdir()) == []
    processes, store = fake.warnings()
    assert "left processes behind" in processes
    assert "time.sleep(300)" in processes
    assert "was removed" in store


def test_children_end_when_the_command_is_killed(play: Callable[..., Fake]) -> None:
    fake = play(runner="until(run_dir / 'agent-ready'); (run_dir / 'stepping').touch(); time.sleep(60)")
    fake.wait_for("stepping")
    fake.driver.kill()
    fake.wait_for("agent-ended")
    end = time.monotonic() + 60
    while fake.left() and time.monotonic() < end:
        time.sleep(0.05)
    assert fake.left() == []
