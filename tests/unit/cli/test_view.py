"""What a run shows, from its events alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nightshift.cli.output import duration, mib
from nightshift.cli.progress import plain_line, render, sparkline
from nightshift.cli.report import report, report_lines
from nightshift.cli.view import RunView, error_text


def fed(*events: dict[str, Any]) -> RunView:
    view = RunView()
    for event in events:
        view.apply(event)
    return view


def step(number: int, at: float, steps: int = 4, **metrics: float) -> dict[str, Any]:
    return {"kind": "step", "time": at, "step": number, "steps": steps, "metrics": metrics}


def evaluation(number: int, at: float, score: float) -> dict[str, Any]:
    return {"kind": "evaluation", "time": at, "step": number, "metrics": {"eval/score": score}}


RUNNING = {"kind": "job", "time": 100.0, "state": "running", "run_id": "first-1"}


def test_time_left_counts_steps_without_evaluations() -> None:
    view = fed(RUNNING, step(1, 110.0), evaluation(1, 150.0, 0.5), step(2, 160.0))
    assert view.seconds_per_step == 10.0
    assert view.seconds_left == 20.0
    assert (view.step, view.steps) == (2, 4)


def test_steps_that_a_resumed_run_makes_again_count_once() -> None:
    view = fed(RUNNING, step(1, 110, **{"reward/mean": 0.1}), step(2, 120, **{"reward/mean": 0.2}))
    view.apply(RUNNING)
    view.apply(step(2, 210, **{"reward/mean": 0.3}))
    assert view.rewards() == [0.1, 0.3]


def test_failure_is_the_jobs_own_error_before_that_of_a_role() -> None:
    role = {"kind": "role", "time": 1.0, "role": "rollout", "state": "failed", "detail": "gone", "fix": "Start it"}
    assert fed(role).failure == "[rollout] gone. Start it"
    assert fed(role, {"kind": "job", "state": "failed", "error": "[trainer] died"}).failure == "[trainer] died"
    assert fed(role, {**role, "state": "ready", "detail": ""}).failure == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ({"type": "RoleError", "role": "reward", "message": "hung", "fix": "End it"}, "[reward] hung. End it"),
        ({"message": "[reward] hung."}, "[reward] hung."),
    ],
)
def test_errors_as_text_and_as_maps(error: Any, text: str) -> None:
    assert error_text(error) == text


def test_plain_lines() -> None:
    view = fed(
        RUNNING, event := step(3, 110.0, **{"reward/mean": 0.25, "kl": 0.00123, "response_tokens_per_second": 81.2})
    )
    assert plain_line(event, view) == "step 3/4  reward 0.250  kl 0.0012  tokens/s 81  10.0 s a step  10.0 s left"
    ready = {"kind": "role", "role": "trainer", "state": "ready", "seconds": 12.34}
    assert plain_line(ready, fed(ready)) == "trainer: ready after 12.3 s"
    score = evaluation(0, 1.0, 0.57)
    assert plain_line(score, fed(score)) == "evaluation at step 0: held-out 0.570"
    warning = {"kind": "warning", "role": "reward", "message": "slow"}
    assert plain_line(warning, fed(warning)) == "warning: [reward] slow"
    assert plain_line({"kind": "span"}, view) is None


def test_live_view_names_roles_steps_and_scores() -> None:
    view = fed(
        RUNNING,
        {"kind": "role", "time": 1.0, "role": "trainer", "state": "ready"},
        {"kind": "role", "time": 1.0, "role": "rollout-0", "state": "starting"},
        {"kind": "activity", "role": "trainer", "doing": "update"},
        evaluation(0, 105.0, 0.57),
        step(1, 115.0, **{"reward/mean": 0.25}),
        step(2, 125.0, **{"reward/mean": 0.5}),
    )
    out = io.StringIO()
    Console(file=out, width=120).print(render(view, 130.0))
    text = out.getvalue()
    for part in ("first-1", "step 2/4", "reward 0.500", "0.570", "update", "about 20.0 s left", "starting 2 min 09 s"):
        assert part in text
    assert text.index("rollout-0") < text.index("trainer")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["kind", "time", "role", "state", "step", "steps", "metrics", "message", "error", "doing"]),
            st.sampled_from(["role", "job", "step", "evaluation", "warning", "summary", "memory", "failed", "reward"])
            | st.none(),
        ).map(lambda e: {k: v for k, v in e.items() if k not in ("time", "step", "steps", "metrics") or v is None})
    )
)
def test_any_event_can_be_drawn(events: list[dict[str, Any]]) -> None:
    view = RunView()
    for event in events:
        view.apply(event)
        plain_line(event, view)
    render(view, 1.0)


def test_report_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "actor" / "global_step_12").mkdir(parents=True)
    (tmp_path / "checkpoints" / "actor" / "global_step_6").mkdir()
    rewards = [step(n, 100.0 + n, 12, **{"reward/mean": n / 12}) for n in range(1, 13)]
    view = fed(
        RUNNING,
        evaluation(0, 100.0, 0.57),
        *rewards,
        evaluation(12, 113.0, 0.99),
        {"kind": "summary", "metrics": {"overlap_share": 0.41}},
        {"kind": "memory", "peak_mib": 8123, "by_role": {"rollout": 5000, "cli": 123}},
    )
    figures = report(view, tmp_path)
    assert figures["held_out"] == {"before": 0.57, "after": 0.99, "step": 12}
    assert figures["reward"]["first"] == pytest.approx(0.25)
    assert figures["reward"]["last"] == pytest.approx(10 / 12)
    assert figures["overlap_share"] == 0.41
    assert figures["checkpoint"].endswith("global_step_12")
    text = "\n".join(report_lines(figures))
    for part in ("0.570", "0.990", "+0.420", "41% of the time", "8123 MiB (rollout 5000, cli 123)"):
        assert part in text


def test_report_of_a_run_that_did_nothing(tmp_path: Path) -> None:
    assert report_lines(report(RunView(), tmp_path)) == [f"run: {tmp_path}"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (12.34, "12.3 s"), (125, "2 min 05 s"), (3725, "1 h 02 min"), (59.97, "60.0 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_and_sparklines() -> None:
    assert mib(3 << 20) == "3 MiB"
    assert mib(3 << 30) == "3.0 GiB"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
