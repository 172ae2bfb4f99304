"""PPO with a critic, distillation and dynamic sampling on the real parts, with the tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import leftovers, run, write_job

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


PPO = {
    "algorithm": {"estimator": "gae", "kl_coef": 0.0, "bootstrap_truncated": True},
    "scorers": {"critic": {"learning_rate": 1e-2}},
}


def test_ppo_with_a_critic_is_deterministic_and_keeps_the_critics_state(model: Path, tmp_path: Path) -> None:
    ended = [run(write_job(tmp_path / name, model, **PPO)) for name in ("first", "second")]
    for run_ in ended:
        assert run_.code == 0, run_.output[-3000:]
        assert leftovers(run_.folder.name) == []
    first, second = (run_.metrics() for run_ in ended)
    for metrics in first:
        assert {"loss/critic", "timing/values", "timing/update_critic", "critic/grad_norm"} <= set(metrics)
    # A new critic knows nothing: its first values are 0, and the first step cannot have clipped them.
    assert first[0]["critic/value_mean"] == 0.0
    assert first[1]["critic/value_mean"] != 0.0
    assert [m["loss/critic"] for m in first] == [m["loss/critic"] for m in second]
    assert ended[0].weights(3).read_bytes() == ended[1].weights(3).read_bytes()
    state = ended[0].folder / "checkpoints" / "critic" / "global_step_3"
    assert (state / "manifest.json").is_file()


def test_distillation_moves_the_policy_towards_its_teacher(model: Path, tmp_path: Path) -> None:
    teacher = build_tiny_model(tmp_path / "teacher", seed=1)
    job = write_job(
        tmp_path / "job",
        model,
        algorithm={"estimator": "distillation", "kl_coef": 0.0},
        scorers={"teacher": {"model": str(teacher)}},
        trainer={"total_steps": 20, "learning_rate": 1e-2, "micro_batch_size": 16},
        rollout={"n": 8, "batch_size": 8, "max_num_seqs": 64},
        rewards=[],
    )
    ended = run(job)
    assert ended.code == 0, ended.output[-3000:]
    rewards = [metrics["reward/mean"] for metrics in ended.metrics()]
    # The teacher is another random model, three nats a token away.
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards


def test_dynamic_sampling_leaves_groups_out_and_fills_the_batch(model: Path, tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job",
        model,
        algorithm={"estimator": "grpo", "kl_coef": 0.0, "filter_zero_spread": True, "overlong_buffer": 4},
        pipeline={"deterministic": False, "max_staleness": 1},
    )
    ended = run(job)
    assert ended.code == 0, ended.output[-3000:]
    (summary,) = ended.of_kind("summary")
    assert summary["ledger"]["dropped_filtered"] == sum(m["rollout/filtered_groups"] for m in ended.metrics())
    assert all(m["advantage/zero_spread_share"] < 1.0 for m in ended.metrics())


def test_dpo_lowers_its_loss_resumes_and_needs_no_server(model: Path, tmp_path: Path) -> None:
    job = write_job(
        tmp_path / "job",
        model,
        data={"train_files": ["pairs.jsonl"], "test_files": ["pairs.jsonl"], "shuffle": True},
        algorithm={"policy_loss": "dpo", "kl_coef": 0.0},
        rewards=[],
        rollout={"batch_size": 4},
        trainer={"total_steps": 12, "learning_rate": 3e-3, "save_freq": 6, "test_freq": 6},
    )
    rows = [{"prompt": f"{at}", "chosen": "abba"[: at % 3 + 2], "rejected": "xyz"} for at in range(16)]
    (tmp_path / "job" / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run(job)
    assert ended.code == 0, ended.output[-3000:]
    metrics = ended.metrics()
    assert metrics[0]["loss/actor"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics[-1]["loss/actor"] < 0.4
    assert metrics[-1]["preference/margin"] > metrics[0]["preference/margin"] + 0.5
    assert [event["metrics"]["eval/score"] for event in ended.of_kind("evaluation")][-1] == 1.0
    assert not any(event["kind"] == "role" and event["role"] == "rollout" for event in ended.events)
    assert leftovers(ended.folder.name) == []
