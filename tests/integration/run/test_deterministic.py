"""``pipeline.deterministic``: a run gives the bits of a plain loop, and every role leaves its mark.

That two runs give the same bits, whatever happens to one of them: test_kills.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import ROOT, Finished, leftovers, run, write_job
from tests.integration.run.shared import STEPS, deterministic_job

pytestmark = pytest.mark.integration

_LOOP = """
import sys
from pathlib import Path
from nightshift.config.load import load_job
from tests.integration.run.sequential import train
print(train(load_job(sys.argv[1]), Path(sys.argv[2])))
"""


_LOOP_ON_SAMPLES = """
import sys
from pathlib import Path
from nightshift.config.load import load_job
from tests.integration.run.sequential import train_on
print(train_on(load_job(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
"""
#: With Adam's usual epsilon the first steps are the gradient's sign, which makes its rounding errors large.
_PLAIN = {
    "pipeline": {"deterministic": False, "role_timeout_s": 240},
    "rollout": {"batch_size": 3},
    "trainer": {"learning_rate": 1e-2, "adam_epsilon": 1e-3},
}


def same_bits(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_weights_change_at_all(deterministic: Finished, tiny_model: Path) -> None:
    assert not same_bits(deterministic.weights(STEPS), tiny_model / "model.safetensors")


def test_a_plain_loop_gives_the_same_bits(deterministic: Finished, tiny_model: Path, tmp_path: Path) -> None:
    # In a process of its own: DeepSpeed's group would stay in this one.
    command = [sys.executable, "-c", _LOOP, str(deterministic_job(tmp_path, tiny_model)), str(tmp_path / "loop")]
    loop = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert loop.returncode == 0, loop.stdout[-2000:] + loop.stderr[-4000:]
    assert same_bits(deterministic.weights(STEPS), tmp_path / "loop" / "export" / "model.safetensors")


def test_o32_without_staleness_a_streamed_run_is_the_loop_on_its_samples(tiny_model: Path, tmp_path: Path) -> None:
    """What was drawn is a matter of chance then; everything behind it is not."""
    job = write_job(tmp_path, tiny_model, **_PLAIN)
    plain = run(job)
    assert plain.code == 0, plain.output
    assert all(metrics["staleness/max"] == 0 for metrics in plain.metrics())
    assert max(metrics["update/parts"] for metrics in plain.metrics()) > 1
    folders = [str(plain.folder / "rollouts"), str(tmp_path / "loop")]
    command = [sys.executable, "-c", _LOOP_ON_SAMPLES, str(job), *folders]
    loop = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert loop.returncode == 0, loop.stdout[-2000:] + loop.stderr[-4000:]
    ours, theirs = load_file(plain.weights(3)), load_file(tmp_path / "loop" / "export" / "model.safetensors")
    start = load_file(tiny_model / "model.safetensors")
    assert max(float((ours[name] - start[name]).abs().max()) for name in ours) > 1e-3
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5


def test_o32_the_first_step_is_on_policy(deterministic: Finished) -> None:
    step = deterministic.metrics()[0]
    assert step["log_ratio/abs_mean"] < 1e-4
    assert step["clip_fraction"] == 0
    assert step["staleness/max"] == 0


def test_nothing_is_left(deterministic: Finished) -> None:
    assert leftovers(deterministic.folder.name) == []
    assert [event for event in deterministic.of_kind("warning") if "left" in event["message"]] == []


def test_roles_that_answer_otherwise_change_the_run(deterministic: Finished, tiny_model: Path, tmp_path: Path) -> None:
    """Each in its own metric of the first step, whose samples are the same."""
    changed = {
        "rewards": [{"function": "reward.py:inverted", "timeout_s": 5}],
        "scorers": {"reference": {"model": str(build_tiny_model(tmp_path / "other", seed=5))}},
    }
    other = run(write_job(tmp_path, tiny_model, **changed), "trainer.total_steps=1")
    assert other.code == 0, other.output
    before, after = deterministic.metrics()[0], other.metrics()[0]
    assert after["reward/mean"] == pytest.approx(1 - before["reward/mean"])
    # The same model as policy and reference starts at a distance of 0.
    assert before["kl"] < 1e-6 < after["kl"]
