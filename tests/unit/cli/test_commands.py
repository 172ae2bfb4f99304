"""Commands on run folders, and their exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightshift.cli.main import main
from nightshift.cli.memory import PeakMemory, assign_roles, pss_bytes
from nightshift.cli.run import differences, exit_code
from nightshift.cli.runs import find_run, hold, make_run, new_run_id
from nightshift.wire.errors import BadInputError
from nightshift.wire.events import EventLog
from nightshift.wire.schedule import StepRecord, append_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first-20250101-000000-abcd"
    make_run(folder)
    with EventLog(folder / "events.jsonl", folder.name) as log:
        log.append("job", state="running")
        log.append("step", step=1, steps=1, metrics={"reward/mean": 0.5})
        log.append("job", state="succeeded")
        ledger = {"issued": 9, "trained": 8, "failed": 1, "dropped_stale": 0, "dropped_filtered": 0, "cancelled": 0}
        log.append("summary", ledger={**ledger, "in_flight": 0}, metrics={})
    (folder / "logs" / "trainer.log").write_text("first\n\nlast\n")
    return folder


def call(run: Path, *arguments: str) -> int:
    return main([*arguments, "--runs-dir", str(run.parent)])


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "rollouts" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("nightshift ")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run"], ["rollouts", "x", "--limit", "-1"], ["plan", "/absent.yaml"]]
)
def test_bad_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err


def test_bad_job_is_one_error_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ntrainer: {learning_rat: 1}\n")
    assert main(["run", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: [job] {path} has 4 errors:")
    assert "trainer.learning_rate" in err


def test_resume_and_run_dir_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "job.yaml", "--resume", "x", "--run-dir", str(tmp_path)]) == 2
    assert "--run-dir" in capsys.readouterr().err


def test_ledger(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "ledger", "first", "--json") == 0
    assert json.loads(capsys.readouterr().out)["balanced"] is True
    with EventLog(run / "events.jsonl", run.name) as log:
        log.append("step", step=2, steps=2, metrics={"ledger/issued": 9.0, "ledger/trained": 8.0})
    assert call(run, "ledger", run.name) == 1
    assert "NOT balanced: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("job", "events", "schedule", "manifest"),
    [
        ("name: x\n", b"", "", ""),
        ("[1]", b'3\n"x"\n{"kind": 5}\n{"kind": "step", "metrics": [1]}\n\xff\xfe\n', "3\nnull\n", "[]"),
        (
            "name: [x\n",
            b'{"kind": "span", "name": "x", "trace_id": "ab", "start": "a", "end": 1}\n'
            b'{"kind": "job", "state": "running", "time": "noon"}\n'
            b'{"kind": "step", "steps": "many"}\n{"kind": "step", "ledger": {"a": "b"}}\n'
            b'{"kind": "span", "trace_id": "ab", "span_id": "1", "links": 3, "attributes": 5}',
            '{"step": 1}\n',
            '{"lineage": 0, "step": 1, "branches": 3, "run_id": "x", "cursor": {"size": 1}}',
        ),
    ],
)
@pytest.mark.parametrize("command", ["ledger", "report", "audit", "replay", "rollouts", "trace", "watch"])
def test_a_folder_of_somebody_else_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    job: str,
    events: bytes,
    schedule: str,
    manifest: str,
) -> None:
    folder = tmp_path / "runs" / "other"
    make_run(folder)
    (folder / "job.yaml").write_text(job)
    (folder / "events.jsonl").write_bytes(events + b'\n{"kind": "job", "state": "succeeded"}\n')
    if schedule:
        (folder / "schedule.jsonl").write_text(schedule)
    if manifest:
        state = folder / "checkpoints" / "trainer" / "global_step_1"
        state.mkdir(parents=True)
        (state / "manifest.json").write_text(manifest)
    options = {"replay": ["--step", "1"]}.get(command, [])
    code = call(folder, command, "ab" if command == "trace" else "other", *options)
    said = capsys.readouterr()
    assert code in (0, 2)
    assert said.err.startswith("error: ") if code else said.out


@pytest.mark.parametrize("step", ["0", "-1", "2", "1000000"])
def test_a_step_that_never_was_is_not_made_again(run: Path, capsys: pytest.CaptureFixture[str], step: str) -> None:
    nothing: dict[str, Any] = {"versions": {}, "left_out": [], "loss": {}, "algorithm": {}, "digest": "", "time": 0.0}
    append_step(run, StepRecord(1, "r/0/0", "r/0/1", 0, [["g0000000"]], learning_rate=1.0, stepped=True, **nothing))
    assert call(run, "replay", "first", "--step", step) == 2
    assert f"no step {step} in its schedule (it has 1 to 1)" in capsys.readouterr().err


def test_logs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "logs", "first", "trainer", "-n", "1") == 0
    assert capsys.readouterr().out == "last\n"
    assert call(run, "logs", "first") == 0
    assert "trainer" in capsys.readouterr().out
    assert call(run, "logs", "first", "trainr") == 2
    assert "Did you mean 'trainer'?" in capsys.readouterr().err


def test_watch_of_an_ended_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "watch", "first") == 0
    assert "step 1/1  reward 0.500" in capsys.readouterr().out
    with EventLog(run / "events.jsonl", run.name) as log:
        log.append("job", state="failed", error="[trainer] died")
    assert call(run, "watch", "first", "--json") == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["kind"] for line in out.splitlines()] == ["job", "step", "job", "summary", "job"]
    assert err == "error: [trainer] died.\n"


def test_rollouts_show_whatever_columns_are_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        rows = [
            {"step": step, "sample_id": f"{step}.{n}", "reward": None if n else 0.5, "response_text": "a\nb" * 40}
            for n in range(2)
        ]
        pq.write_table(pa.Table.from_pylist(rows), run / "rollouts" / f"step_{step:06d}.parquet")
    assert call(run, "rollouts", "first", "--limit", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "sample", "reward", "response"]
    assert [line.split()[1] for line in lines[1:]] == ["2.0", "2.1", "1.0"]
    assert lines[2].split()[2] == "-"
    assert call(run, "rollouts", "first", "--step", "1", "--json") == 0
    assert [json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()] == ["1.0", "1.1"]
    assert call(run, "rollouts", "first", "--step", "7") == 2
    (run / "rollouts" / "step_000003.parquet").write_text("no parquet")
    assert call(run, "rollouts", "first") == 2
    assert "step_000003.parquet" in capsys.readouterr().err


def test_export_copies_the_newest_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "export", "first", str(tmp_path / "out")) == 2
    for step in (2, 10):
        folder = run / "checkpoints" / "actor" / f"global_step_{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(step))
    assert call(run, "export", "first", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "config.json").read_text() == "10"
    capsys.readouterr()
    assert call(run, "export", "first", str(tmp_path / "out"), "--step", "2") == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert call(run, "export", "first", str(tmp_path / "two"), "--step", "3") == 2
    assert "It has: 2, 10" in capsys.readouterr().err
    assert call(run, "export", "first", str(tmp_path / "two"), "--step", "2") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs", "two"]


def test_runs_are_found_by_folder_id_and_beginning(run: Path) -> None:
    assert find_run(str(run)) == run
    assert find_run(run.name, run.parent) == run
    assert find_run("first-2025", run.parent) == run
    with pytest.raises(BadInputError, match="first-20250101"):
        find_run("second", run.parent)
    other = run.parent / "first-20250101-000000-abce"
    make_run(other)
    (other / "job.yaml").touch()
    with pytest.raises(BadInputError, match="several"):
        find_run("first", run.parent)


def test_run_ids_and_folders(run: Path) -> None:
    assert new_run_id("first", 0.0).startswith("first-19700101-000000-")
    with pytest.raises(BadInputError, match="exists"):
        make_run(run)
    with hold(run), pytest.raises(BadInputError, match="another process"), hold(run):
        pass


def test_exit_codes_of_the_runner() -> None:
    assert [exit_code(code) for code in (0, 1, 2, 130, 3, -9)] == [0, 1, 2, 130, 1, 1]


def test_differences_between_two_jobs() -> None:
    old = {"trainer": {"seed": 0, "ranks": 1}, "rewards": [{"weight": 1}]}
    new = {"trainer": {"seed": 1, "ranks": 1}, "rewards": [{"weight": 1}], "name": "b"}
    assert differences(old, new) == ["trainer.seed: 0 -> 1", "name: None -> 'b'"]
    assert differences(old, old) == []


def test_memory_is_counted_by_role() -> None:
    parents = {10: 1, 11: 10, 12: 11, 13: 10, 14: 13, 15: 13, 99: 1}
    commands = {
        11: "python -m orchestrator.runner",
        12: "helper",
        13: "python -m services.agent",
        14: "VLLM::EngineCore",
        15: "ray::TrainerRank",
    }
    roles = assign_roles(10, parents, commands)
    assert [roles[pid] for pid in range(10, 16)] == [
        "cli",
        "orchestrator",
        "orchestrator",
        "agent",
        "rollout",
        "trainer",
    ]
    assert 99 not in roles
    assert pss_bytes(os.getpid()) > 1 << 20
    found = iter([{"cli": 5 << 20, "rollout": 1 << 20}, {"cli": 1 << 20, "rollout": 9 << 20}, {"cli": 2 << 20}])
    times = iter([0.0, 0.001, 10.0, 10.3, 50.0, 50.0])
    peak = PeakMemory(lambda: next(found), clock=lambda: next(times))
    waits = [peak.look() for _ in range(3)]
    assert peak.report() == {"peak_mib": 10, "by_role": {"rollout": 9, "cli": 1}}
    assert waits == pytest.approx([2.0, 30.0, 2.0]), "sampling takes a hundredth of the time at most"
