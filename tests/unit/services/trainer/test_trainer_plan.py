"""Micro-batches by tokens, losses of several samples at once, and views of the published buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.experience import LossSpec
from services.trainer.aggregate import AGGREGATIONS, token_weights, weighted_sum
from services.trainer.batching import plan, shard
from services.trainer.losses import LossInputs, policy_loss
from services.trainer.shared_weights import view_arguments


@given(
    st.lists(st.integers(1, 50), max_size=30),
    st.integers(1, 4),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 120)),
)
def test_every_item_of_a_share_is_in_one_micro_batch_within_the_limit(lengths, world, size, max_tokens) -> None:
    pieces = plan(lengths, world, size, max_tokens)
    for rank, mine in enumerate(pieces):
        assert sorted(index for piece in mine for index in piece) == shard(range(len(lengths)), rank, world)
        for piece in mine:
            if max_tokens is None:
                assert len(piece) <= size
            else:
                assert len(piece) == 1 or len(piece) * max(lengths[index] for index in piece) <= max_tokens


def test_equal_lengths_fill_the_budget() -> None:
    assert [len(piece) for piece in plan([640] * 256, 1, 4, 20480)[0]] == [32] * 8


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo_clip", {}),
        ("gspo", {}),
        ("cispo", {}),
        ("decoupled_ppo", {}),
        ("ppo_clip_proximal", {"sequence_importance_cap": 1.2, "importance_cap": 1.5}),
    ],
)
def test_several_samples_at_once_give_the_sums_of_each_alone(aggregation: str, name: str, options) -> None:
    torch.manual_seed(0)
    sizes = [3, 1, 5]
    spec = LossSpec(policy_loss=name, aggregation=aggregation, constant_length=7, options=options)
    logprobs, behaviour, advantages = torch.randn(3, 9)
    masks = [np.array(mask, np.uint8) for mask in ([1, 0, 1], [1], [1, 1, 0, 0, 1])]
    mask = torch.from_numpy(np.concatenate(masks)) > 0
    alone = 0.0
    parts = zip(*(x.split(sizes) for x in (logprobs, behaviour, advantages, mask)), strict=True)
    for one, part in zip(masks, parts, strict=True):
        inputs = LossInputs(*part)
        weights = torch.from_numpy(token_weights([one], aggregation))
        alone += weighted_sum(policy_loss(inputs, spec).losses, inputs.mask, weights).item()
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    inputs = LossInputs(logprobs, behaviour, advantages, mask, None, sequence, 3)
    weights = torch.from_numpy(token_weights(masks, aggregation))
    together = weighted_sum(policy_loss(inputs, spec).losses, mask, weights).item()
    assert together == pytest.approx(alone, rel=1e-5)


def test_a_view_is_rebuilt_from_the_buffers_arguments() -> None:
    flat = torch.arange(24.0)
    view = flat[8:20].view(3, 4)
    whole = (torch.Tensor, flat.size(), flat.stride(), 0, "storage", torch.float32, 0, b"handle", 96, 512, False)
    kind, size, stride, offset, *allocation = view_arguments(whole, view, 8)
    assert kind is torch.Tensor
    assert torch.equal(torch.as_strided(flat, size, stride, offset), view)
    assert tuple(allocation) == whole[4:]
