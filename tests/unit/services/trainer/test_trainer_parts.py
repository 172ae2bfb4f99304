"""Any way to cut a batch into parts gives the whole batch's sums: the coordinator over two ranks in numpy."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.wire.experience import LossSpec, Sample, pack_loss, pack_samples, unpack_loss, unpack_samples
from services.trainer.aggregate import AGGREGATIONS, token_weights
from services.trainer.batching import shard, trained
from services.trainer.coordinator import Coordinator, UpdateAnswer, UpdateCall
from services.trainer.sums import PartSums
from services.trainer.updates import PartKey
from tests.fixtures.samples import make_sample

FACTS = {"model": "toy", "dtype": "float32", "zero_stage": 2, "vocab_size": 64, "max_positions": 128}


class SumRanks:
    """Two ranks whose token loss is the advantage, and whose gradient is the loss itself."""

    world = 2

    def __init__(self) -> None:
        self.gradient = [0.0, 0.0]
        self.steps: list[float] = []

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self, method)(rank, *args) for rank in range(self.world)]

    def accumulate(self, rank: int, samples: bytes, loss: bytes, loss_divisor: float, discard: bool) -> PartSums:
        mine, spec = shard(trained(unpack_samples(samples)), rank, self.world), unpack_loss(loss)
        if discard:
            self.gradient[rank] = 0.0
        weights = token_weights([sample.loss_mask for sample in mine], spec.aggregation)
        values = np.concatenate([sample.advantages for sample in mine if sample.advantages is not None] or [[]])
        total = float((values * weights).sum())
        self.gradient[rank] += total / loss_divisor
        tokens = sum(sample.trained_tokens for sample in mine)
        return PartSums(tokens=tokens, sequences=len(mine), loss=total, policy=total, max_ratio=float(len(mine)))

    def apply(self, rank: int, divisor: float, learning_rate: float) -> dict[str, float]:
        if rank == 0:
            self.steps.append(sum(self.gradient) / divisor)
        return {"grad_norm": 1.0}

    def discard(self, rank: int) -> None:
        self.gradient[rank] = 0.0

    def peak_memory(self, rank: int) -> int:
        return 1


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Sample], list[list[Sample]]]:
    """A batch, some of it masked or empty, and the same in parts, some of them without a sample."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=10))
    values = st.floats(-4, 4, width=32)
    samples = [
        make_sample(
            f"g{at}.0",
            mask=mask,
            advantages=np.array(draw(st.lists(values, min_size=len(mask), max_size=len(mask))), np.float32)
            * np.array(mask, np.float32),
        )
        for at, mask in enumerate(masks)
    ]
    cuts = sorted(draw(st.lists(st.integers(0, len(samples)), max_size=4)))
    return samples, [samples[a:b] for a, b in itertools.pairwise([0, *cuts, len(samples)])]


async def _update(parts: list[list[Sample]], specs: list[LossSpec], broken: int) -> tuple[UpdateAnswer, list[float]]:
    """Sends parts, behind an attempt that is given up after so many of them."""
    ranks = SumRanks()
    coordinator = Coordinator(ranks, FACTS | {"parameters": 1, "optimizer_steps": 0}, Path("unused"))
    await coordinator.load("", "r/0/0")

    async def send(attempt: int, number: int) -> UpdateAnswer:
        return await coordinator.update(
            UpdateCall(
                PartKey(1, attempt, number),
                "r/0/0",
                "r/0/1",
                number == len(parts) - 1,
                pack_samples(parts[number]),
                pack_loss(specs[number]),
                0.5,
            )
        )

    for number in range(broken):
        await send(0, number)
    answers = [await send(1, number) for number in range(len(parts))]
    assert not any(answer.applied for answer in answers[:-1])
    return answers[-1], ranks.steps


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=60, deadline=None)
@given(batches(), st.booleans(), st.integers(0, 3))
def test_o14_any_parts_give_the_whole_batch_s_sums(
    aggregation: str, batch: tuple[list[Sample], list[list[Sample]]], counted: bool, broken: int
) -> None:
    samples, parts = batch
    spec = LossSpec(aggregation=aggregation, constant_length=5)
    whole = replace(
        spec,
        total_tokens=sum(sample.trained_tokens for sample in samples),
        total_sequences=sum(sample.trained_tokens > 0 for sample in samples),
    )
    # The last part carries the totals, or the trainer takes what it counted.
    specs = [*[spec] * (len(parts) - 1), spec if counted and len(parts) > 1 else whole]
    wanted, wanted_steps = asyncio.run(_update([samples], [whole], 0))
    got, steps = asyncio.run(_update(parts, specs, min(broken, len(parts) - 1)))
    assert got.stepped == wanted.stepped
    assert got.metrics.keys() == wanted.metrics.keys()
    for name in ("tokens", "sequences", "loss/actor", "loss/policy"):
        assert got.metrics.get(name, 0) == pytest.approx(wanted.metrics.get(name, 0), rel=1e-6, abs=1e-6)
    assert steps == pytest.approx(wanted_steps, rel=1e-6, abs=1e-6)
