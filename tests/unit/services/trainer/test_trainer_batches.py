"""Aggregation over a batch, padded micro-batches, and what becomes of them in a small model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import LossSpec, Sample
from services.trainer.aggregate import AGGREGATIONS, divisor, token_weights, weighted_sum
from services.trainer.batching import micro_batches, pad, plan, trained
from services.trainer.losses import LossInputs, policy_loss
from services.trainer.policy import Policy, can_share, to_device
from services.trainer.sums import PartSums, to_metrics
from tests.fixtures.samples import make_sample

#: The batch of three sequences; the last one is fully masked.
LOSSES = [[1.0, 1.0], [3.0] * 6, [99.0, 99.0]]
MASKS = [[1, 1], [1] * 6, [0, 0]]


def total_of(losses: Tensor, masks: list[np.ndarray], aggregation: str) -> Tensor:
    """Sum of weighted losses [N] of samples with these masks."""
    mask = torch.tensor(np.concatenate(masks)) > 0
    return weighted_sum(losses, mask, torch.tensor(token_weights(masks, aggregation)))


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [("token_mean", 2.5), ("seq_mean_token_mean", 2.0), ("seq_mean_token_sum", 10.0), ("constant_length", 1.0)],
)
def test_o13_aggregation(aggregation: str, want: float) -> None:
    masks = [np.array(mask, np.uint8) for mask in MASKS]
    total = total_of(torch.tensor(np.concatenate(LOSSES)), masks, aggregation).item()
    tokens, sequences = sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks)
    assert total / divisor(aggregation, tokens, sequences, 10) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_o13_a_masked_token_has_no_influence_even_as_nan(aggregation: str) -> None:
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    total = total_of(values, [np.array([1, 0], np.uint8)], aggregation)
    total.backward()
    assert total.item() == 1.0
    assert values.grad.tolist() == [1.0, 0.0]


def test_constant_length_needs_a_length() -> None:
    with pytest.raises(BadInputError, match="constant_length"):
        divisor("constant_length", 8, 2, 0)


def test_o14_two_micro_batches_give_the_mean_over_all_tokens() -> None:
    parts = PartSums(tokens=2, sequences=1, loss=4.0) + PartSums(tokens=6, sequences=1, loss=30.0)
    assert to_metrics(parts, LossSpec())["loss/actor"] == 4.25


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 5), st.integers(1, 6), st.none() | st.integers(1, 90))
def test_every_item_is_in_one_micro_batch_of_one_rank(
    lengths: list[int], world: int, size: int, max_tokens: int | None
) -> None:
    pieces = plan(lengths, world, size, max_tokens)
    shares = [sorted(index for micro in rank for index in micro) for rank in pieces]
    assert [index for share in shares for index in share] == list(range(len(lengths)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for micro in (micro for rank in pieces for micro in rank):
        if max_tokens is None:
            assert len(micro) <= size
        else:
            assert len(micro) == 1 or len(micro) * max(lengths[index] for index in micro) <= max_tokens


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=8), st.booleans())
def test_a_row_shows_each_response_its_prompt_and_itself_only(items: list[tuple[int, int]], share: bool) -> None:
    prompts = [np.arange(10 * (k + 1), 10 * (k + 1) + k + 1, dtype=np.int32) for k in range(3)]
    pairs = [(prompts[k], np.arange(100 + 10 * n, 100 + 10 * n + t, dtype=np.int32)) for n, (k, t) in enumerate(items)]
    batch = pad(pairs, share)
    assert batch.sizes == [t for _, t in items]
    length = batch.input_ids.shape[1]
    visible = np.tril(np.ones((length, length), bool)) if batch.visible is None else None
    at = 0
    for prompt, response in pairs:
        for index in range(len(response)):
            row, place = int(batch.rows[at]), int(batch.keep[batch.columns[at]])
            assert batch.targets[at] == response[index]
            seen = (visible if batch.visible is None else batch.visible[row])[place]
            positions = np.arange(length) if batch.position_ids is None else batch.position_ids[row]
            # What the predicting position sees is the sequence up to it, each token at its own position.
            want = np.concatenate([prompt, response[:index]])
            assert (batch.input_ids[row][seen] == want).all()
            assert (positions[seen] == np.arange(len(want))).all()
            at += 1


def small_policy(vocab: int = 64) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Policy(LlamaForCausalLM(config).double(), autocast=False)


def batch_of(count: int) -> list[Sample]:
    rng = np.random.default_rng(1)
    samples = []
    for index in range(count):
        tokens = int(rng.integers(1, 8))
        mask = rng.integers(0, 2, tokens)
        mask[0] = index != 2  # one sample may be fully masked
        sample = make_sample(f"g.{index}", mask=mask.tolist())
        sample.prompt_ids = rng.integers(4, 64, int(rng.integers(1, 9))).astype(np.int32)
        sample.response_ids = rng.integers(4, 64, tokens).astype(np.int32)
        sample.advantages = rng.normal(size=tokens).astype(np.float32)
        sample.logprobs = -rng.random(tokens).astype(np.float32) * 5
        samples.append(sample)
    return samples


def gradient(policy: Policy, samples: list[Sample], aggregation: str, size: int) -> Tensor:
    """Gradient of the batch's loss in micro-batches of ``size``, divided once at the end."""
    spec = LossSpec(aggregation=aggregation, constant_length=10)
    policy.zero_grad()
    kept = trained(samples)
    for micro in micro_batches(kept, size):
        batch = pad([(sample.prompt_ids, sample.response_ids) for sample in micro])
        temperature = torch.ones(len(batch.targets), dtype=torch.float64)
        logprobs, _ = policy(temperature=temperature, **to_device(batch, torch.device("cpu")))
        masks = [sample.loss_mask for sample in micro]
        behaviour, advantages = (
            torch.tensor(np.concatenate([getattr(sample, name) for sample in micro]))
            for name in ("logprobs", "advantages")
        )
        inputs = LossInputs(logprobs, behaviour, advantages, torch.tensor(np.concatenate(masks)) > 0)
        total_of(policy_loss(inputs, spec).losses, masks, aggregation).backward()
    total = divisor(aggregation, sum(sample.trained_tokens for sample in kept), len(kept), 10)
    return torch.cat([p.grad.flatten() for p in policy.parameters()]) / total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_o14_gradients_do_not_depend_on_the_micro_batch_size(aggregation: str) -> None:
    policy, samples = small_policy(), batch_of(8)
    whole = gradient(policy, samples, aggregation, 8)
    for size in (1, 2, 4):
        assert torch.linalg.vector_norm(gradient(policy, samples, aggregation, size) - whole) < 1e-5 * whole.norm()


class FixedLogits(torch.nn.Module):
    """A "model" that answers one row of logits everywhere."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self._logits = torch.tensor(logits)

    def forward(self, input_ids: Tensor, logits_to_keep: Tensor, **unused: object):  # type: ignore[no-untyped-def]
        logits = self._logits.expand(len(input_ids), len(logits_to_keep), -1)
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize(
    ("temperature", "logprob", "entropy"), [(1.0, -0.4076060, 0.832396), (0.5, -0.1429316, 0.441057)]
)
def test_o15_temperature_divides_the_logits(temperature: float, logprob: float, entropy: float) -> None:
    batch = pad([(np.array([1], np.int32), np.array([0], np.int32))])
    policy = Policy(FixedLogits([2.0, 1.0, 0.0]), autocast=False)
    got, spread = policy(temperature=torch.tensor([temperature]), **to_device(batch, torch.device("cpu")))
    assert got.item() == pytest.approx(logprob, abs=1e-5)
    assert spread.item() == pytest.approx(entropy, abs=1e-5)


def test_o15_ratio_is_one_when_both_sides_use_the_temperature() -> None:
    policy = Policy(FixedLogits([2.0, 1.0, 0.0]), autocast=False)
    batch = pad([(np.array([1], np.int32), np.array([0], np.int32))])
    got, _ = policy(temperature=torch.tensor([0.5]), **to_device(batch, torch.device("cpu")))
    assert math.exp(got.item() - -0.1429316) == pytest.approx(1.0, abs=1e-5)


def test_log_probs_of_a_padded_sequence_equal_those_of_the_sequence_alone() -> None:
    policy, samples = small_policy(), batch_of(6)
    pairs = [(sample.prompt_ids, sample.response_ids) for sample in samples]

    def log_probs(some: list[tuple[np.ndarray, np.ndarray]]) -> Tensor:
        batch = pad(some)
        ones = torch.ones(len(batch.targets), dtype=torch.float64)
        return policy(temperature=ones, **to_device(batch, torch.device("cpu")))[0]

    alone = torch.cat([log_probs([pair]) for pair in pairs])
    assert torch.allclose(log_probs(pairs), alone, atol=1e-5)
    prompt, response = pairs[0]
    ids = torch.tensor(np.concatenate([prompt, response]))[None].long()
    logits = policy.model(input_ids=ids).logits.float().double()
    direct = torch.log_softmax(logits, -1)[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    assert torch.allclose(alone[: len(response)], direct, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_responses_that_share_the_row_of_their_prompt_get_the_values_that_they_have_alone(attention: str) -> None:
    policy = small_policy()
    policy.model.set_attn_implementation(attention)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, 64, n).astype(np.int32) for n in (7, 3)]
    pairs = [(prompts[n // 4], rng.integers(4, 64, n % 4).astype(np.int32)) for n in range(8)]

    def run(share: bool) -> tuple[Tensor, Tensor]:
        policy.zero_grad()
        batch = pad(pairs, share)
        ones = torch.ones(len(batch.targets), dtype=torch.float64)
        values, _ = policy(temperature=ones, **to_device(batch, torch.device("cpu")))
        (values * torch.arange(len(values))).sum().backward()
        return values, torch.cat([p.grad.flatten() for p in policy.parameters()])

    assert len(pad(pairs, share=True).input_ids) == 2
    values, gradients = zip(run(share=True), run(share=False), strict=True)
    assert torch.allclose(values[0], values[1], atol=1e-5)
    assert torch.linalg.vector_norm(gradients[0] - gradients[1]) < 1e-5 * gradients[1].norm()
    assert can_share(policy)


def test_a_model_with_a_sliding_window_does_not_share_rows() -> None:
    policy = small_policy()
    policy.model.config.sliding_window = 4096
    assert not can_share(policy)
