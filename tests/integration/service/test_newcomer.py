"""The quickstart's way through the service with real parts: the page's own commands, from ``nightshift up`` to the
exported folder in transformers. The model is a tiny one, and the example's job is fitted to it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nightshift.client import Client
from tests.fixtures import quickstart
from tests.fixtures.quickstart import ROOT
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import leftovers

pytestmark = pytest.mark.integration
#: Slow until the page resumes the job, so that its earlier commands find it between two steps on any machine.
REWARD = """import time
from pathlib import Path


def score(response, ground_truth):
    if not Path({marker!r}).exists():
        time.sleep(0.5)
    return sum(letter in ground_truth for letter in response) / max(1, len(response))
"""


def fit(example: Path, model: Path, marker: Path) -> None:
    """Makes the example's job one for the tiny model, which has a token for each letter."""
    job = (example / "job.yaml").read_text()
    for old, new in (
        (r"path: builtin:\S+", f"path: {model}"),
        (r"max_prompt_length: 64", "max_prompt_length: 230"),
        (r"dtype: bfloat16", "dtype: float32"),
        (r"autocast: bfloat16", "autocast: null"),
        (r"timeout_s: 5 ", "timeout_s: 60 "),
        (r"max_num_seqs: 32", "max_num_seqs: 16"),
        (r"kv_cache_gib: 0.5", "kv_cache_gib: 0.05"),
        (r"batch_size: 8 ", "batch_size: 2 "),
    ):
        job, count = re.subn(old, new, job)
        assert count, f"the example has no {old}"
    (example / "job.yaml").write_text(job)
    (example / "reward.py").write_text(REWARD.format(marker=str(marker)))
    test = example / "data" / "lastword" / "test.parquet"
    pq.write_table(pq.read_table(test).slice(0, 4), test)


@contextmanager
def page_service(folder: Path, data_dir: Path, model: Path, environment: dict[str, str]) -> Iterator[str]:
    """The page's ``nightshift up``, on a free port; gives its address."""
    command = f"exec {quickstart.up_command()} --port 0 --json --allow-path {model}"
    with (data_dir.parent / "up.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", command], env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 120)
        assert ready, "the service did not say that it listens"
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_the_page_is_followed_from_up_to_transformers(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    folder, data_dir, marker = tmp_path / "repository", tmp_path / "data", tmp_path / "resumed"
    fit(quickstart.repository(folder), model, marker)
    path = quickstart.tools(tmp_path / "bin", before=f'[ "$1" = resume ] && touch {marker}')
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "NIGHTSHIFT_DATA_DIR": str(data_dir),
    }
    data_dir.mkdir()
    with page_service(folder, data_dir, model, environment) as url:
        environment["NIGHTSHIFT_URL"] = url
        with Client(url, (data_dir / "admin-token").read_text().strip()) as client:
            try:
                said = quickstart.bash(quickstart.script(data_dir, url), folder, environment, 900)
            except BaseException:
                for job in client.jobs():
                    print(client.logs(job.id, "job")[-3000:])
                    if not job.has_ended:
                        client.cancel(job.id)
                        client.wait(job.id, 120)
                raise
            (made,) = client.jobs()
            assert (made.state, made.step) == ("succeeded", 30), made.error
            ledger = client.ledger(made.id)
            assert ledger["balanced"]
            assert ledger["trained"] == 30 * 2
            (changed,) = [event.data for event in client.events(made.id, kinds=["setting"])]
            assert (changed["key"], changed["new"]) == ("trainer.learning_rate", 2e-5)
            starts = [event for event in client.events(made.id, kinds=["state"]) if event.data["state"] == "starting"]
            assert len(starts) == 2, "cancelled, and resumed"
            metrics = client.metrics(made.id, kind="train")
            assert [point["step"] for point in metrics][-25:] == list(range(6, 31))
            assert metrics[-1]["metrics"]["lr"] == 2e-5
    assert "\nbalanced\n" in said, "the ledger's last line"
    loaded = subprocess.run(
        [sys.executable, "-c", quickstart.loading() + "print(sum(p.numel() for p in model.parameters()))"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    assert int(loaded.stdout.split()[-1]) > 10_000
    assert leftovers(made.id) == []
