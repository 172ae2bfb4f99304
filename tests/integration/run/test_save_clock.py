"""A job that asks for no checkpoint at all: a killed rank costs what was made since the clock's last one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nightshift.analysis.audit import audit
from nightshift.analysis.evidence import load
from tests.chaos.real import write_chaos_job
from tests.chaos.victims import VICTIMS, find, kill
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import Running, leftovers

pytestmark = pytest.mark.integration

STEPS = 30


def test_a_killed_rank_costs_what_was_made_since_the_checkpoint_of_the_clock(tmp_path: Path) -> None:
    job = write_chaos_job(tmp_path / "job", build_tiny_model(tmp_path / "model"), steps=STEPS, save_freq=0)
    values = yaml.safe_load(job.read_text())
    values["trainer"]["save_minutes"] = 0.02
    job.write_text(yaml.safe_dump(values))
    pace = job.with_name("pace")
    pace.write_text("0.1")  # seconds a sample, so that the kill comes within the run
    running = Running(job)
    saved = running.wait_for("checkpoint")["step"]
    running.wait_for("step", step=saved + 1)
    (pid,) = find(running.process.pid, VICTIMS["rank"])
    assert kill(pid)
    running.wait_for("role", role="trainer", state="restarting")
    pace.write_text("0")
    finished = running.finish()
    assert finished.code == 0, finished.output[-3000:]
    assert leftovers(finished.folder.name) == []
    assert audit(load(finished.folder)).balanced
    starts = [event["step"] for event in finished.of_kind("job") if event.get("state") == "running"]
    assert len(starts) == 2
    assert starts[1] >= saved > 0
    # The last checkpoint is the end's own, with its export; those of the clock had none and are gone.
    for kind in ("trainer", "actor"):
        folders = (finished.folder / "checkpoints" / kind).glob("global_step_*")
        assert [path.name for path in folders] == [f"global_step_{STEPS}"]
