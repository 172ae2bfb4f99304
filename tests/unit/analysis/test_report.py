"""The report on small runs that are written here, with times that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightshift.analysis.batches import batches
from nightshift.analysis.recording import Span, load
from nightshift.analysis.report import Report, report
from nightshift.cli.main import main
from nightshift.cli.report_command import lines_of
from nightshift.wire.events import EventLog

ORIGIN = 1000.0
#: Seconds of a synchronous step: generation 4, scoring of the last group 1, update 3, publication 1, delivery 1.
STEP = 10.0
TIMES = {
    "timing/gen": 4.0,
    "timing/reward": 2.0,
    "timing/ref": 0.0,
    "timing/adv": 0.0,
    "timing/update_actor": 3.0,
    "timing/publish": 1.0,
    "timing/sync": 0.5,
    "timing/push": 1.0,
    "timing/wait": 5.0,
}


def write_run(folder: Path, *, bound: Any = 0, steps: int = 6, seconds: float = STEP, evaluated: int = 0) -> Path:
    """A run of alike steps, each with two groups of two samples.

    Args:
        bound: pipeline.max_staleness.
        seconds: length of a step as metrics.jsonl has it.
        evaluated: step that an evaluation of 20 s follows; 0: none.
    """
    (folder / "rollouts").mkdir(parents=True)
    (folder / "job.yaml").write_text(json.dumps({"pipeline": {"max_staleness": bound, "weight_update": "in_flight"}}))
    log = EventLog(folder / "events.jsonl", folder.name, clock=lambda: ORIGIN)
    log.append("job", state="running")
    lines, at = [], ORIGIN
    for step in range(1, steps + 1):
        # Sequences of group 0 take 1 and 2 s, those of group 1 1 and 4 s: area 8, peak 4, so u = 8 / (4 x 4).
        for group, (longest, scored) in enumerate([(2.0, 3.0), (4.0, 5.0)]):
            trace = f"{step:016x}{group:016x}"
            span(log, "generate", trace, at, at + 1)
            span(log, "generate", trace, at, at + longest)
            span(log, "reward", trace, at + longest, at + scored)
            span(log, "group", trace, at, at + 8, **{"rl.step": step})
        span(log, "optimizer_step", "f" * 32, at + 5, at + 8)
        span(log, "publish", "f" * 32, at + 8, at + 9)
        end = at + STEP
        taken = seconds
        if step == evaluated + 1 and evaluated:
            span(log, "evaluate", "f" * 32, at - 20, at)
            taken += 20
        lines.append({"step": step, "kind": "train", "time": end, "metrics": {**TIMES, "timing/step": taken}})
        log.append("step", step=step, steps=steps, metrics={})
        at = end + (20 if step == evaluated else 0)
        rows = [
            {
                "step": step,
                "group_id": f"g{step}.{sample // 2}",
                "trained_version": f"{folder.name}/0/{step - 1}",
                "versions": [f"{folder.name}/0/{max(0, step - 1 - (bound or 0))}"],
                "version_starts": [0],
                "response_tokens": 3,
                "response_text": "not read",
            }
            for sample in range(4)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / f"step_{step:06d}.parquet")
    log.close()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "kind": "tra')
    return folder


def span(log: EventLog, name: str, trace: str, start: float, end: float, **attributes: Any) -> None:
    log.append("span", name=name, role="", trace_id=trace, start=start, end=end, attributes=attributes, links=[])


def read(folder: Path) -> Report:
    return report(load(folder))


def test_synchronous_run_is_predicted_exactly(tmp_path: Path) -> None:
    found = read(write_run(tmp_path / "run"))
    assert (found.mode, found.max_staleness, found.missing) == ("sync", 0, [])
    assert found.steps.used == [2, 3, 4, 5, 6]
    assert found.steps.left_out == {"warm-up": 1}
    assert found.stages["scoring_tail"] == 1.0
    assert found.predicted is not None
    # 4 + 1 + 3 + 1 + 1 against 10; asynchronous: trainer 3 + 1 against rollout 0.5 x 4 + 0.5 and scoring 2.
    assert (found.predicted.sync, found.predicted.own, found.predicted.error) == (10.0, 10.0, 0.0)
    assert found.predicted.by_staleness == {"0": 10.0, "1": 5.0, "2": 4.0, "4": 4.0, "8": 4.0, "none": 4.0}
    assert (found.predicted.staleness_needed, found.predicted.other_staleness, found.predicted.other) == (2, 2, 4.0)


def test_busy_share_and_bubble_come_from_spans(tmp_path: Path) -> None:
    roles = {role.role: role for role in read(write_run(tmp_path / "run")).roles}
    assert set(roles) == {"rollout", "reward", "trainer"}
    assert roles["rollout"].busy == pytest.approx(0.4)
    assert roles["reward"].busy == pytest.approx(0.2)
    assert roles["trainer"].busy == pytest.approx(0.4)
    for role in roles.values():
        assert role.busy is not None
        assert role.bubble == pytest.approx(1 - role.busy)
        assert role.predicted_bubble == pytest.approx(role.bubble)


def test_occupancy_of_a_batch_comes_from_its_sequences(tmp_path: Path) -> None:
    slots = read(write_run(tmp_path / "run")).slots
    assert slots is not None
    assert (slots.peak, slots.occupancy, slots.longest_over_mean) == (4, 0.5, 2.0)


def test_staleness_is_counted_from_stored_rollouts(tmp_path: Path) -> None:
    ages = read(write_run(tmp_path / "run", bound=1, seconds=5.0)).staleness
    assert ages is not None
    assert (ages.groups, ages.samples, ages.tokens) == ({0: 2, 1: 10}, {0: 4, 1: 20}, {0: 12, 1: 60})


def test_steps_that_an_evaluation_interrupts_are_left_out(tmp_path: Path) -> None:
    found = read(write_run(tmp_path / "run", evaluated=3))
    assert found.steps.left_out == {"warm-up": 1, "interrupted": 1}
    assert found.steps.used == [2, 3, 5, 6]
    assert found.steps.mean == 10.0


def test_last_step_of_an_asynchronous_job_is_run_out(tmp_path: Path) -> None:
    found = read(write_run(tmp_path / "run", bound=1, seconds=5.0))
    assert found.steps.left_out == {"warm-up": 2, "run-out": 1}
    assert found.predicted is not None
    assert (found.mode, found.predicted.own, found.predicted.limit) == ("async", 5.0, "staleness")
    assert (found.predicted.other_staleness, found.predicted.other) == (0, 10.0)


def test_bound_that_holds_the_trainer_back_is_named_with_its_price(tmp_path: Path) -> None:
    told = read(write_run(tmp_path / "run", bound=1, seconds=5.0)).advice
    assert "The staleness bound sets the pace: 10.00 s" in told[0]
    assert "pipeline.max_staleness 2 in place of 1 would make a step 4.00 s long" in told[1]


def test_trainer_that_sets_the_pace_hides_generation(tmp_path: Path) -> None:
    told = read(write_run(tmp_path / "run", bound=None, seconds=4.0)).advice
    assert "The trainer sets the pace: training 3.00 s, publication 1.00 s" in told[0]
    assert "it may take 1.8 times as long" in told[1]  # (4 - 0.5) / (0.5 x 4)
    assert "pipeline.max_staleness 2 keeps the slowest stage fed; no bound makes samples older" in told[2]


def test_step_that_the_model_does_not_explain_is_said_to_be(tmp_path: Path) -> None:
    told = read(write_run(tmp_path / "run", bound=4, seconds=6.0)).advice
    assert any("2.00 s more than the model" in line for line in told)


def test_what_is_not_there_is_missing_and_not_made_up(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("events.jsonl", "job.yaml"):
        (folder / name).unlink()
    for path in (folder / "rollouts").iterdir():
        path.unlink()
    (folder / "job.yaml").write_text("name: x\n")
    found = read(folder)
    assert (found.mode, found.roles, found.staleness, found.slots, found.advice) == (None, [], None, None, [])
    assert found.predicted is not None
    assert (found.predicted.own, found.predicted.sync) == (None, 4.0 + 2.0 + 3.0 + 1.0 + 1.0)
    assert {line.partition(":")[0] for line in found.missing} == {
        "the run's own mode",
        "tail of scoring",
        "slot occupancy",
        "staleness",
        "busy share of the rollout",
        "busy share of the trainer",
    }
    assert [line for line in lines_of(found) if line.startswith("missing: staleness")]


def test_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.yaml").write_text("{}")
    found = read(folder)
    assert (found.steps.made, found.steps.median, found.predicted, found.roles) == (0, None, None, [])
    assert any(line.startswith("step times:") for line in found.missing)
    assert lines_of(found)


def test_run_whose_every_step_was_interrupted_says_so(tmp_path: Path) -> None:
    found = read(write_run(tmp_path / "run", steps=2, evaluated=1))
    assert found.steps.used == [2]
    assert "steps in full flow: there are none, so the figures are of interrupted steps" in found.missing


def test_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "demo-1", bound=1, seconds=5.0)
    assert main(["report", "demo", "--runs-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "max_staleness 1 5.00 s 5.00 s model +0%; pace: staleness" in " ".join(shown.split())
    assert "missing" not in shown
    assert main(["report", str(tmp_path / "demo-1"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["predicted"]["own"] == 5.0
    assert figures["staleness"]["samples"] == {"0": 4, "1": 20}


def test_unreadable_rollouts_end_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "rollouts" / "step_000002.parquet").write_bytes(b"half of a file")
    assert main(["report", str(folder)]) == 2
    assert "step_000002.parquet" in capsys.readouterr().err


def test_training_behind_the_last_score_counts_and_what_was_streamed_before_does_not() -> None:
    def at(name: str, start: float, end: float, step: int | None = None) -> Span:
        return Span(name, "a" if step is None or name == "group" else "job", start, end, step)

    spans = [
        at("group", 0, 12, 1),
        at("generate", 0, 4),
        at("reward", 4, 6),
        at("update_part", 2, 5, 1),
        at("update_part", 5, 7, 1),
        at("optimizer_step", 8, 10, 1),
    ]
    batch = batches({name: [s for s in spans if s.name == name] for name in {s.name for s in spans}})[1]
    assert batch.training_tail == 1 + 2
    assert batch.tail == 2
