"""The critic's rank and preference updates on the tiny model, under DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from nightshift.wire.experience import LossSpec, Sample
from services.trainer.config import RankConfig
from services.trainer.critic import CriticRank
from services.trainer.rank import TrainerRank
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.trainer.test_trainer_rank import batch, distance, weights

pytestmark = pytest.mark.integration
VALUE = LossSpec(policy_loss="value", options={"value_clip": 0.2})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def critic(model: Path, **settings: Any) -> CriticRank:
    return CriticRank(RankConfig(**{"model_path": str(model), "role": "critic", "adam_epsilon": 1e-2, **settings}))


def sequences(samples: list[Sample]) -> list[dict[str, Any]]:
    return [{"id": s.sample_id, "prompt_ids": s.prompt_ids, "response_ids": s.response_ids} for s in samples]


def valued(rank: CriticRank, samples: list[Sample]) -> list[Sample]:
    """The samples with the critic's values, and returns that depend on the response's length alone."""
    for sample, result in zip(samples, rank.log_probs(sequences(samples)), strict=True):
        sample.values = result["logprobs"]
        sample.returns = np.full(len(sample.response_ids), len(sample.response_ids) / 4, np.float32)
    return samples


def test_a_new_value_head_begins_at_zero_and_learns_the_returns(model: Path) -> None:
    rank = critic(model)
    samples = valued(rank, batch(16))
    assert all(not sample.values.any() for sample in samples if sample.values is not None)
    losses = []
    for _ in range(40):
        losses.append(rank.update(valued(rank, samples), VALUE, 3e-3)["loss/critic"])
    assert losses[-1] < 0.25 * losses[0]
    seen = {item["name"]: item for item in rank.tensors()}
    assert {item["role"] for item in seen.values()} == {rank.config.role}
    assert seen["values"]["shape"] == seen["returns"]["shape"] == seen["old_values"]["shape"]
    assert rank.update(valued(rank, samples), VALUE, 0.0)["critic/clip_fraction"] == 0.0


def test_values_know_nothing_of_their_own_token(model: Path) -> None:
    rank = critic(model)
    rank.update(valued(rank, batch(8)), VALUE, 1e-2)
    one, other = (batch(1, 1)[0] for _ in range(2))
    other.response_ids = one.response_ids.copy()
    other.response_ids[-1] = (one.response_ids[-1] + 1) % 100 + 5
    first, second = rank.log_probs(sequences([one, other]))
    assert np.allclose(first["logprobs"], second["logprobs"], atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_o14_value_updates_do_not_depend_on_the_micro_batch_size(model: Path, stage: int) -> None:
    ends = []
    for size in (8, 1, 2):
        rank = critic(model, micro_batch_size=size, zero_stage=stage)
        for _ in range(2):
            rank.update(valued(rank, batch()), VALUE, 1e-2)
        ends.append(weights(rank))
    assert distance(ends[0], ends[1]) < 1e-5
    assert distance(ends[0], ends[2]) < 1e-5


def test_packed_rows_do_not_change_a_step_on_values_or_pairs(model: Path) -> None:
    critics, policies = [], []
    for packed in (False, True):
        rank = critic(model, padding_free=packed, share_prompts=False)
        for _ in range(2):
            rank.update(valued(rank, batch()), VALUE, 1e-2)
        critics.append(weights(rank))
        trained = TrainerRank(
            RankConfig(model_path=str(model), padding_free=packed, share_prompts=False, adam_epsilon=1e-2)
        )
        for _ in range(2):
            trained.update(pairs(trained), dpo(), 1e-2)
        policies.append(weights(trained))
    assert distance(*critics) < 1e-5
    assert distance(*policies) < 1e-5


def test_published_values_are_those_of_the_rank(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    rank = critic(model)
    samples = batch(4)
    rank.update(valued(rank, samples), VALUE, 1e-2)
    published = rank.publish(tmp_path)
    assert published is not None
    copy = AutoModelForTokenClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    missing = copy.load_state_dict(load_file(tmp_path / published.name), strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == []
    sample = samples[0]
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    with torch.no_grad():
        values = copy.eval()(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1, 0]
    assert np.allclose(values.numpy(), rank.log_probs(sequences([sample]))[0]["logprobs"], atol=1e-5)


def pairs(rank: TrainerRank, count: int = 6) -> list[Sample]:
    """Preference pairs with the rank's own log-probs as the reference; a chosen one has letters, the other digits."""
    rng = np.random.default_rng(1)
    samples = []
    for at in range(count):
        prompt = rng.integers(5, 60, 5).astype(np.int32)
        for slot, (low, high) in enumerate(((5, 30), (60, 90))):
            (sample,) = batch(1, 1, seed=at * 2 + slot)
            tokens = int(rng.integers(2, 6))
            sample.sample_id, sample.group_id = f"p{at}.{slot}", f"p{at}"
            sample.prompt_ids = prompt
            sample.response_ids = rng.integers(low, high, tokens).astype(np.int32)
            sample.logprobs = np.zeros(tokens, np.float32)
            sample.loss_mask = np.ones(tokens, np.uint8)
            sample.advantages = np.zeros(tokens, np.float32)
            sample.versions[:] = [type(sample.versions[0])("r/0/0", 0, tokens)]
            samples.append(sample)
    for sample, result in zip(samples, rank.log_probs(sequences(samples)), strict=True):
        sample.ref_logprobs = result["logprobs"]
    return samples


def dpo(loss: str = "dpo") -> LossSpec:
    return LossSpec(policy_loss=loss, aggregation="seq_mean_token_sum", options={"beta": 0.1})


def test_o23_dpo_begins_at_log_2_and_lowers_its_loss(model: Path) -> None:
    rank = TrainerRank(RankConfig(model_path=str(model)))
    samples = pairs(rank)
    history = [rank.update(samples, dpo(), 1e-3) for _ in range(30)]
    assert history[0]["loss/actor"] == pytest.approx(np.log(2), abs=1e-5)
    assert history[0]["preference/margin"] == pytest.approx(0.0, abs=1e-5)
    assert history[-1]["loss/actor"] < 0.4
    assert history[-1]["preference/accuracy"] == 1.0
    assert history[-1]["preference/margin"] > 0.5


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_o14_a_preference_step_does_not_depend_on_the_micro_batch_size(model: Path, loss: str) -> None:
    ends = []
    for size in (8, 1, 2):
        rank = TrainerRank(RankConfig(model_path=str(model), micro_batch_size=size, adam_epsilon=1e-2))
        samples = pairs(rank)
        for _ in range(2):
            rank.update(samples, dpo(loss), 1e-2)
        ends.append(weights(rank))
    assert distance(ends[0], ends[1]) < 1e-5
    assert distance(ends[0], ends[2]) < 1e-5
