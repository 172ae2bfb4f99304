"""The quickstart's way through the service, as it is written, with a process that plays the job.

With real parts: tests/integration/service/test_newcomer.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.fakes.up import Up
from tests.fixtures import quickstart


def test_the_commands_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    job = quickstart.repository(folder) / "job.yaml"
    job.write_text(
        re.sub(r"^rollout:.*\n", "rollout:\n  request_timeout_s: 0.05\n", job.read_text(), flags=re.MULTILINE)
    )
    with Up(tmp_path / "data") as up:
        (up.folder / "hold").write_text("6")  # what the page does to the running job, it does there
        path = quickstart.tools(tmp_path / "bin", f'[ "$1" != resume ] || rm {up.folder / "hold"}')
        environment = {**up.environment, "NIGHTSHIFT_URL": up.url, "PATH": path}
        said = quickstart.bash(quickstart.script(up.folder, up.url), folder, environment, 400)
        with up.client() as client:
            (made,) = client.jobs()
            assert (made.state, made.step) == ("succeeded", 30)
            pending = client.settings(made.id)["pending"]
            assert pending == {"trainer.learning_rate": 2e-5}, "the process that plays the job knows no settings"
            assert {Path(name).name for name in client.get(made.id).spec["data"]["train_files"]} == {"train.parquet"}
    assert json.loads((folder / "my-model" / "config.json").read_text()) == {"step": 30}
    assert "balanced" in said
    assert '"reward/mean"' in said
    assert quickstart.up_command().startswith("nightshift up")
