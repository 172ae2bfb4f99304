"""The quickstart's way through the service, as it is written, with a process that plays the job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fakes.service import ROOT
from tests.fakes.up import Up

PAGE = ROOT / "docs" / "quickstart.md"
DATA_DIR, URL = "~/.local/state/nightshift", "http://127.0.0.1:8700"


def script() -> str:
    """The commands of the section on the service."""
    section = PAGE.read_text().split("## On a service")[1]
    found = re.search(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    assert found is not None
    return found[1]


def test_the_commands_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nightshift").write_text(f'#!/bin/sh\nexec {sys.executable} -m nightshift.cli.main "$@"\n')
    (tools / "nightshift").chmod(0o755)
    repository = tmp_path / "repository"
    (repository / "examples").mkdir(parents=True)
    example = repository / "examples" / "first_run"
    example.mkdir()
    for name in ("job.yaml", "reward.py", "make_data.py"):
        (example / name).write_bytes((ROOT / "examples" / "first_run" / name).read_bytes())
    subprocess.run([sys.executable, str(example / "make_data.py")], check=True, timeout=120, capture_output=True)
    # Slow enough for the steps between which the page acts.
    job = (example / "job.yaml").read_text()
    (example / "job.yaml").write_text(
        re.sub(r"^rollout:.*\n", "rollout:\n  request_timeout_s: 1.5\n", job, flags=re.MULTILINE)
    )
    with Up(tmp_path / "data") as up:
        text = script().replace(DATA_DIR, str(up.folder)).replace(URL, up.url)
        environment = {**up.environment, "NIGHTSHIFT_URL": up.url, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], env=environment, cwd=repository, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        with up.client() as client:
            (made,) = client.jobs()
            assert (made.state, made.step) == ("succeeded", 30)
            pending = client.settings(made.id)["pending"]
            assert pending == {"trainer.learning_rate": 2e-5}, "the process that plays the job knows no settings"
    assert json.loads((repository / "my-model" / "config.json").read_text()) == {"step": 30}
    assert "balanced" in done.stdout
