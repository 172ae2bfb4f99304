"""Packed rows: their layout, and that each sequence gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nightshift.config import JobSpec
from nightshift.wire.errors import BadInputError
from services.trainer import policy as policies
from services.trainer.batching import Batch, Pair, pack, pad, plan, shard
from services.trainer.config import RankConfig
from services.trainer.packed_attention import PACKED, packed_attention
from services.trainer.policy import Policy, to_device, use_packed_rows
from services.trainer.values import ValueModel

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
CONFIG = RankConfig(model_path="model", padding_free=True)


def llama() -> Policy:
    return Policy(LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4)), autocast=False)


def grouped_heads() -> Policy:
    return Policy(Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)), False)


def critic() -> Any:
    # Not in training mode, where its head has dropout.
    return ValueModel(LlamaForTokenClassification(LlamaConfig(**SHAPE, num_labels=1)), False).eval()


def checkpointed() -> Policy:
    policy = llama()
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy.train()


def compiled() -> Policy:
    policy = grouped_heads()
    for layer in policy.model.get_decoder().layers:
        layer.compile(dynamic=True, backend="eager")
    return policy


def pairs_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Pair]:
    """Random ids of these numbers of prompt and response tokens."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(4, 64, p).astype(np.int32), rng.integers(4, 64, t).astype(np.int32)) for p, t in lengths]


def run(policy: Any, batches: list[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs (or values) and entropies of all batches, and the gradient of a sum that weighs each token its own."""
    policy.zero_grad()
    results = []
    for batch in batches:
        temperature = torch.full((len(batch.targets),), 0.7)
        values, entropy = policy(temperature=temperature, **to_device(batch, torch.device("cpu")))
        weights = torch.as_tensor(batch.targets, dtype=torch.float32).cos()
        (values @ weights + 0.1 * entropy.sum()).backward()
        results.append((values.detach(), entropy.detach()))
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return torch.cat([v for v, _ in results]), torch.cat([e for _, e in results]), gradient


def far(one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> float:
    """Largest difference of values and entropies, or of the gradients in parts of their norm."""
    values = max(float((a - b).abs().max()) for a, b in zip(one[:2], other[:2], strict=True))
    return max(values, float(torch.linalg.vector_norm(one[2] - other[2]) / torch.linalg.vector_norm(other[2])))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8))
def test_a_packed_row_holds_each_sequence_once_at_its_own_positions(lengths: list[tuple[int, int]]) -> None:
    pairs = pairs_of(lengths)
    batch = pack(pairs)
    assert batch.starts is not None
    assert batch.position_ids is not None
    assert batch.sizes == [len(response) for _, response in pairs]
    assert batch.input_ids.shape == batch.position_ids.shape == (1, batch.starts[-1])
    predicted = iter(zip(batch.rows, batch.keep[batch.columns], batch.targets, strict=True))
    for (prompt, response), start, end in zip(pairs, batch.starts[:-1], batch.starts[1:], strict=True):
        assert batch.input_ids[0, start:end].tolist() == [*prompt, *response[:-1]]
        assert batch.position_ids[0, start:end].tolist() == list(range(end - start))
        for index, token in enumerate(response):
            assert next(predicted) == (0, start + len(prompt) - 1 + index, token)
    assert next(predicted, None) is None


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 4), st.integers(1, 120))
def test_packed_micro_batches_count_no_padding(lengths: list[int], world: int, max_tokens: int) -> None:
    pieces = plan(lengths, world, 4, max_tokens, packed=True)
    for rank, mine in enumerate(pieces):
        assert sorted(index for piece in mine for index in piece) == shard(range(len(lengths)), rank, world)
        for piece, after in zip(mine, [*mine[1:], None], strict=False):
            total = sum(lengths[index] for index in piece)
            assert len(piece) == 1 or total <= max_tokens
            assert after is None or total + lengths[after[0]] > max_tokens


LENGTHS = [
    [(3, 4)],
    [(1, 1), (1, 1)],
    [(7, 5), (2, 9), (4, 1), (1, 12)],
    [(3, 0), (5, 6), (5, 6)],
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("build", [llama, grouped_heads, critic, checkpointed, compiled])
def test_packed_sequences_get_what_they_get_in_padded_rows_and_alone(
    build: Callable[[], Any], lengths: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    policy, pairs = build(), pairs_of(lengths)
    padded = run(policy, [pad(pairs)])
    use_packed_rows(policy, CONFIG, role="trainer")
    assert far(run(policy, [pack(pairs)]), padded) < 1e-5
    assert far(run(policy, [pack([pair]) for pair in pairs]), padded) < 1e-5
    assert far(run(policy, [pack(pairs[:1]), pack(pairs[1:])] if pairs[1:] else [pack(pairs)]), padded) < 1e-5


def test_packed_rows_through_the_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    policy, pairs = llama(), pairs_of(LENGTHS[2])
    padded = run(policy, [pad(pairs)])
    use_packed_rows(policy, CONFIG, role="trainer")
    monkeypatch.setattr(policies, "WHOLE_LOGITS", 0)
    assert far(run(policy, [pack(pairs)]), padded) < 1e-5


@pytest.mark.parametrize("build", [llama, grouped_heads, critic])
@pytest.mark.parametrize("planted", [[0, 10, 20, 24, 36], [0, 12, 20, 24, 36], [0, 11, 24, 36], [0, 36]])
def test_a_boundary_at_a_wrong_place_shows(build: Callable[[], Any], planted: list[int]) -> None:
    torch.manual_seed(0)
    policy, pairs = build(), pairs_of(LENGTHS[2])
    use_packed_rows(policy, CONFIG, role="trainer")
    batch = pack(pairs)
    assert batch.starts is not None
    assert batch.starts.tolist() == [0, 11, 21, 25, 37]
    wrong = np.array([*planted[:-1], 37], np.int32)
    right = run(policy, [batch])
    assert far(run(policy, [replace(batch, starts=wrong)]), right) > 1e-2


def test_a_layer_is_compiled_once_whatever_the_lengths() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    policy, counter = grouped_heads(), CompileCounter()
    use_packed_rows(policy, CONFIG, role="trainer")
    for layer in policy.model.get_decoder().layers:
        layer.compile(dynamic=True, backend=counter)
    run(policy, [pack(pairs_of(LENGTHS[2]))])
    graphs = counter.frame_count
    assert graphs > 0
    for seed, lengths in enumerate([[(5, 3)], [(2, 2)] * 7, [(9, 20), (1, 1)], *LENGTHS]):
        run(policy, [pack(pairs_of(lengths, seed))])
    assert counter.frame_count == graphs


def refusal(policy: Any) -> str:
    with pytest.raises(BadInputError) as refused:
        use_packed_rows(policy, CONFIG, role="trainer")
    return str(refused.value)


def test_a_model_that_cannot_keep_sequences_apart_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    windowed, eager, leaking, deaf = llama(), llama(), llama(), llama()
    windowed.model.config.sliding_window = 4096
    assert "trainer.padding_free does not fit LlamaForCausalLM" in refusal(windowed)
    eager.model.set_attn_implementation("eager")
    assert "LlamaForCausalLM" in refusal(eager)
    decoder = deaf.model.get_decoder()
    hears = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda cu_seq_lens_q=None, max_length_q=None, **rest: hears(**rest))
    assert "LlamaForCausalLM" in refusal(deaf)

    def whole_row(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **unused: Any) -> Any:
        return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), None

    try:
        AttentionInterface.register(PACKED, whole_row)
        assert "do not keep the sequences of one row apart" in refusal(leaking)
    finally:
        AttentionInterface.register(PACKED, packed_attention)


UNASKED = replace(CONFIG, padding_free=None)


def test_unasked_rows_are_packed_where_one_kernel_can_attend() -> None:
    torch.manual_seed(0)
    whole, half, cast = llama(), llama().to(torch.bfloat16), llama()
    cast.autocast = True
    for policy in (whole, half, cast):
        use_packed_rows(policy, UNASKED, role="trainer")
    assert [policy.packed for policy in (whole, half, cast)] == [False, True, True]
    assert whole.model.config._attn_implementation == "sdpa"


def test_unasked_a_model_that_cannot_keep_sequences_apart_keeps_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    windowed, deaf = llama().to(torch.bfloat16), llama().to(torch.bfloat16)
    windowed.model.config.sliding_window = 4096
    decoder = deaf.model.get_decoder()
    hears = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda cu_seq_lens_q=None, max_length_q=None, **rest: hears(**rest))
    pairs = pairs_of(LENGTHS[2])
    before = run(deaf, [pad(pairs)])
    for policy in (windowed, deaf):
        use_packed_rows(policy, UNASKED, role="trainer")
        assert not policy.packed
        assert policy.model.config._attn_implementation == "sdpa"
    assert far(run(deaf, [pad(pairs)]), before) == 0.0


@pytest.mark.parametrize(
    ("device", "deterministic", "asked", "found"),
    [
        ("cuda", False, None, None),
        ("cuda", True, None, False),
        ("cpu", False, None, False),
        ("cuda", False, False, False),
        ("cpu", False, True, True),
    ],
)
def test_unasked_rows_are_packed_on_cuda_alone_and_not_in_a_deterministic_run(
    device: str, deterministic: bool, asked: bool | None, found: bool | None
) -> None:
    job = {
        "name": "a",
        "model": {"path": "m"},
        "data": {"train_files": ["a.jsonl"]},
        "rewards": [{"function": "r.py:f"}],
        "pipeline": {"deterministic": deterministic},
        "trainer": {"padding_free": asked},
    }
    if deterministic:
        job["pipeline"]["max_staleness"] = 0
    assert RankConfig.from_spec(JobSpec.model_validate(job), device).padding_free is found
