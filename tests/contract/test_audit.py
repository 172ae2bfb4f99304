"""``nightshift audit`` on the files of a run with fake services: it balances, and what is planted in them is named."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightshift.cli.main import main
from tests.fakes.run import FakeRun

BATCH, STEPS = 2, 5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose server was killed in the middle of responses, so that some were drawn in parts."""

    async def make() -> Path:
        settings: dict[str, Any] = {
            "rollout": {"flush_tokens": 1},
            "pipeline": {"max_staleness": 1},
            "trainer": {"save_freq": 2},
            "checkpoint": {"keep": 1},
        }
        async with FakeRun(tmp_path_factory.mktemp("audited"), prompts=BATCH * STEPS, token_s=0.01, **settings) as run:

            async def watch(_job: Any) -> None:
                await run.until(lambda: any(line.sent >= 2 for line in run.samples()), "half a response")
                await run.restart(run.engine)
                await asyncio.Event().wait()

            assert await run.run(watch=watch) == 0, run.error()
            return run.run_dir

    return asyncio.run(make())


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def test_it_balances_and_says_how(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "balanced"
    assert f"issued {BATCH * STEPS} = {BATCH * STEPS} trained + 0 dropped stale" in text
    assert main(["audit", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["balanced"], found["step"], found["samples"], found["findings"]) == (True, STEPS, 20, [])


def test_it_reads_neither_the_database_nor_the_events(folder: Path) -> None:
    for name in ("state.db", "events.jsonl", "metrics.jsonl", "job.yaml", "services.json"):
        (folder / name).write_bytes(b"")
    shutil.rmtree(folder / "spool")
    assert main(["audit", str(folder)]) == 0


def edit_rows(folder: Path, step: int, change: Callable[[list[dict[str, Any]]], Any]) -> dict[str, Any]:
    """Changes a step's rows; returns the first one as it was."""
    path = folder / "rollouts" / f"step_{step:06d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return dict(table.slice(0, 1).to_pylist()[0])


def edit_manifests(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    for path in [*folder.glob("checkpoints/manifests/*.json"), *folder.glob("checkpoints/trainer/*/manifest.json")]:
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))


def group_of(folder: Path, step: int) -> str:
    return str(edit_rows(folder, step, lambda rows: None)["group_id"])


def a_duplicate(folder: Path) -> str:
    group = group_of(folder, 1)
    edit_manifests(folder, lambda manifest: manifest["consumed"].get("5", []).append(int(group[1:])))
    return f"[duplicate] {group}: step 5 trained it, and so did step 1"


def a_loss(folder: Path) -> str:
    edit_manifests(folder, lambda manifest: manifest["consumed"].get("3", []).clear())
    group = group_of(folder, 3)
    return f"[loss] {group}: it was issued, and neither trained nor dropped, failed, cancelled or in flight"


def an_altered_token(folder: Path) -> str:
    def alter(rows: list[dict[str, Any]]) -> None:
        rows[0]["response_ids"][-1] += 1

    row = edit_rows(folder, 2, alter)
    return f"[tokens] {row['sample_id']}: tokens "


def a_version_that_is_too_old(folder: Path) -> str:
    def age(rows: list[dict[str, Any]]) -> None:
        rows[0]["versions"] = [f"{folder.name}/0/0" for _ in rows[0]["versions"]]

    name = edit_rows(folder, 4, age)["sample_id"]
    return f"[stale] {name}: token 0 is 3 versions older than the weights that step 4 trained; at most 1 are allowed"


def a_step_of_a_foreign_lineage(folder: Path) -> str:
    def move(manifest: dict[str, Any]) -> None:
        if manifest["step"] == 4:
            manifest["lineage"] = 1

    edit_manifests(folder, move)
    return "[lineage] step 3: only lineage 1 says what it trained, which is no ancestor of the final weights"


@pytest.mark.parametrize(
    "plant", [a_duplicate, a_loss, an_altered_token, a_version_that_is_too_old, a_step_of_a_foreign_lineage]
)
def test_what_is_planted_fails_and_is_named(
    folder: Path, plant: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = plant(folder)
    assert main(["audit", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "NOT balanced" in text
    assert f"- {sentence}" in text
    assert main(["audit", str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["balanced"] is False


def test_a_run_without_a_commit_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder / "checkpoints")
    assert main(["audit", str(folder)]) == 2
    assert "has no checkpoint: nothing is committed yet" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rollouts/step_000001.parquet", "checkpoints/manifests/0-2.json"])
def test_a_file_that_cannot_be_read_is_named(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).write_bytes(b"{")
    assert main(["audit", str(folder)]) == 2
    assert Path(name).name in capsys.readouterr().err
