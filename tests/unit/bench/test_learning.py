"""The learning bench: its task, one step of each method, and its tables. What it measures is not checked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bench import bench_learning, small_task
from tests.bench.learning_tables import learning_table, staleness_table
from tests.bench.small_task import END, Problem, Small


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(bench_learning, "PROMPTS", 2)
    monkeypatch.setattr(bench_learning, "N", 3)


def test_the_model_has_one_to_three_million_parameters() -> None:
    assert 1e6 < sum(p.numel() for p in Small().parameters()) < 3e6


def test_rewards_are_shares_of_digits_in_their_places() -> None:
    problem = Problem(np.array([3, 9, 1, 7, 5, 10]), np.array([9, 7, 5, END]))
    for answer, share in (([9, 7, 5, END], 1), ([9, 5, 7, END], 1 / 3), ([9, 7, 5], 0), ([9, 7, END], 0)):
        assert small_task.reward(problem, np.array(answer)) == pytest.approx(share)
    for made in small_task.problems(50, np.random.default_rng(0)):
        assert small_task.reward(made, made.answer) == 1.0


def test_log_probs_of_samples_are_those_of_a_forward_pass() -> None:
    torch.manual_seed(0)
    model, generator = Small(), torch.Generator().manual_seed(0)
    prompts = [problem.prompt for problem in small_task.problems(5, np.random.default_rng(1))]
    responses, logprobs = small_task.sample(model, prompts, 0.7, generator)
    with torch.no_grad():
        again = small_task.token_logprobs(model, prompts, responses, 0.7).numpy()
    assert np.concatenate(logprobs) == pytest.approx(again, abs=1e-5)


@pytest.mark.parametrize("name", [*bench_learning.METHODS, "decoupled@1", "truncated@1", "vtrace@1"])
def test_each_method_makes_steps(name: str) -> None:
    torch.manual_seed(0)
    method = bench_learning.METHODS.get(name) or bench_learning.STALE_METHODS[name]
    model = Small()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learner = bench_learning.Learner(model, method, 0)
    learner._rng = np.random.default_rng(3)
    for _ in range(2):
        # A model that has not been warmed up is seldom right: what teaches here is where rewards fall.
        learner._groups = lambda picked, first, own=learner._groups: [  # type: ignore[method-assign,misc]
            [_with_reward(s, float(at % 2)) for at, s in enumerate(group)] for group in own(picked, first)
        ]
        assert np.isfinite(learner.step()["reward"])
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())


def _with_reward(sample: Any, reward: float) -> Any:
    sample.reward, sample.reward_parts = reward, {"right": reward}
    return sample


def test_runs_are_kept_and_read_by_their_number_of_steps(tmp_path: Path) -> None:
    line = '{"kind": "curves", "steps": 4, "method": "grpo", "seed": 1, "curve": [0.1, 0.5], "samples": 9}\n'
    (tmp_path / bench_learning.RUNS).write_text(line)
    assert list(bench_learning.read_runs(tmp_path, 4)) == [("curves", "grpo", 1)]
    assert bench_learning.read_runs(tmp_path, 5) == {}


def test_tables_say_whether_what_was_expected_came_true() -> None:
    runs = [
        {"method": m, "seed": s, "curve": [0.2, e], "samples": 10} for s in (0, 1) for m, e in (("a", 0.6), ("b", 0.1))
    ]
    lines = learning_table(runs, {"a": (">=", 0.5), "b": ("gain <=", 0.0), "absent": (">=", 0.5)})
    assert len(lines) == 4
    assert lines[2].endswith(">= 0.5 | yes |")
    assert lines[3].endswith("gain <= 0 | yes |")
    stale = [
        {"method": f"decoupled@{eta}", "seed": seed, "curve": [0.2, 0.5 + eta * step]}
        for seed, step in enumerate((0.001, 0.002, 0.001))
        for eta in (0, 4)
    ]
    assert "equivalent within 0.05: yes" in staleness_table(stale, (0, 4), 0.05)[-1]
    assert "equivalent within 0.001: no" in staleness_table(stale, (0, 4), 0.001)[-1]
