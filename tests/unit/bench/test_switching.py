"""Stretches of a job whose staleness bound is changed while it runs."""

from typing import Any

import pytest

from tests.gpu.switching import ratios, stretches


def events_of(bounds: list[int], seconds: dict[int, float]) -> list[dict[str, Any]]:
    """Steps under these bounds, each as long as its bound says; the job file's bound is the first."""
    events, now = [], 0.0
    for step, bound in enumerate(bounds, 1):
        if step > 1 and bound != bounds[step - 2]:
            setting = {"kind": "setting", "key": "pipeline.max_staleness", "new": bound, "step": step}
            events += [setting, {"kind": "setting", "key": "trainer.save_freq", "new": 9, "step": step + 1}]
        now += seconds[bound]
        events.append(
            {"kind": "step", "step": step, "time": now, "metrics": {"samples": 8, "staleness/max": float(bound)}}
        )
    return events


def test_a_change_ends_a_stretch_and_its_first_step_counts_for_nothing():
    found = stretches(events_of([1, 1, 1, 1, 0, 0, 0, 1, 1, 1], {1: 2.0, 0: 4.0}), 1, warm=1)
    assert [(stretch["bound"], stretch["steps"], stretch["seconds_per_step"]) for stretch in found] == [
        (1, 2, 2.0),
        (0, 2, 4.0),
        (1, 2, 2.0),
    ]
    assert [stretch["oldest"] for stretch in found] == [1.0, 0.0, 1.0]


def test_a_ratio_is_that_of_a_stretch_to_the_next_one():
    found = stretches(events_of([1] * 4 + [0] * 3 + [1] * 3 + [0] * 3, {1: 2.0, 0: 3.0}), 1, warm=1)
    assert ratios(found, [1, 0]) == pytest.approx([1.5, 1.5], abs=0.01)


def test_a_stretch_of_one_step_has_no_time():
    assert len(stretches(events_of([1, 1, 1, 0], {1: 2.0, 0: 3.0}), 1, warm=0)) == 1
