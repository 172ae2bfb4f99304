"""Packed rows on CUDA, where one kernel attends: the values and gradients of padded rows, up to bfloat16's rounding.

Run where there is a GPU: pytest -m gpu tests/gpu/test_packed.py
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM

from services.trainer.batching import Batch, Pair, pack, pad
from services.trainer.config import RankConfig
from services.trainer.packed_attention import PACKED
from services.trainer.policy import Policy, _compile_layers, to_device, use_packed_rows

pytestmark = pytest.mark.gpu

CONFIG = Qwen2Config(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    initializer_range=0.06,  # large enough that what a token sees decides about its log-prob
    tie_word_embeddings=True,
)
LENGTHS = [(40, 300), (7, 1), (129, 64), (16, 511), (1, 90), (200, 17)]


def pairs_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Pair]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(4, 1024, p).astype(np.int32), rng.integers(4, 1024, t).astype(np.int32)) for p, t in lengths]


def build(dtype: torch.dtype, *, packed: bool, autocast: bool = False) -> Policy:
    torch.manual_seed(0)
    # A copy, since the model writes the name of its attention into it.
    policy = Policy(Qwen2ForCausalLM(deepcopy(CONFIG)).to(dtype), autocast)
    if packed:
        use_packed_rows(policy, RankConfig(model_path="model", padding_free=True), role="trainer")
        assert policy.model.config._attn_implementation == PACKED
    return policy.cuda()


def run(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of a sum that weighs each token its own."""
    policy.zero_grad()
    ones = torch.ones(len(batch.targets), device="cuda")
    values, entropy = policy(temperature=ones, **to_device(batch, torch.device("cuda")))
    weights = torch.as_tensor(batch.targets, dtype=torch.float32, device="cuda").cos()
    (values @ weights + 0.1 * entropy.sum()).backward()
    gradient = torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.grad is not None])
    return values.detach().float(), gradient


def errors(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Mean difference of the log-probs, and that of the gradient in parts of its norm."""
    norms = [float(torch.linalg.vector_norm(x)) for x in (got[1] - want[1], want[1])]
    return float((got[0] - want[0]).abs().mean()), norms[0] / norms[1]


@pytest.mark.parametrize("autocast", [False, True])
def test_packed_rows_are_as_near_to_the_exact_values_as_padded_ones_and_a_leak_is_not(autocast: bool) -> None:
    pairs = pairs_of(LENGTHS)
    exact = run(build(torch.float32, packed=False), pad(pairs))
    dtype = torch.float32 if autocast else torch.bfloat16
    padded = errors(run(build(dtype, packed=False, autocast=autocast), pad(pairs)), exact)
    policy, batch = build(dtype, packed=True, autocast=autocast), pack(pairs)
    packed = errors(run(policy, batch), exact)
    assert batch.starts is not None
    leak = errors(run(policy, replace(batch, starts=batch.starts[[0, 1, 2, 4, 5, 6]])), exact)
    print(
        "mean error of log-probs, relative error of the gradient:", {"padded": padded, "packed": packed, "leak": leak}
    )
    for mine, theirs, leaking in zip(packed, padded, leak, strict=True):
        assert mine < 2 * theirs
        assert leaking > 3 * mine


def test_in_float32_packed_rows_equal_padded_ones() -> None:
    pairs = pairs_of(LENGTHS)
    packed, padded = (run(build(torch.float32, packed=p), lay(pairs)) for p, lay in ((True, pack), (False, pad)))
    values, gradient = errors(packed, padded)
    assert values < 1e-4
    assert gradient < 1e-3


def test_compiled_layers_are_made_once_whatever_the_lengths() -> None:
    policy, plain = build(torch.bfloat16, packed=True), build(torch.bfloat16, packed=True)
    _compile_layers(policy.model)
    run(policy, pack(pairs_of(LENGTHS)))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for seed, lengths in enumerate([[(5, 30)], [(20, 20)] * 70, [(90, 200), (1, 1)], LENGTHS[:3]]):
        batch = pack(pairs_of(lengths, seed))
        values, gradient = errors(run(policy, batch), run(plain, batch))
        assert values < 0.1
        assert gradient < 0.2
    assert counters["stats"]["unique_graphs"] == graphs
