"""From samples to padded micro-batches of token ids, in numpy.

Sequences are padded on the right only. Under a causal mask no real token sees the padding, so that neither an attention
mask nor position ids are needed, and the values equal those of an unpadded sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nightshift.wire.experience import Sample

T = TypeVar("T")
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """B sequences padded to length L, and where their N response tokens are predicted.

    Logits are wanted only at the columns ``keep`` (K of them), from the first one that predicts a response token
    to the last one.
    """

    input_ids: Longs  # [B, L]
    keep: Longs  # [K] columns of input_ids
    rows: Longs  # [N] row of each response token
    columns: Longs  # [N] index into ``keep`` of the position that predicts it
    targets: Longs  # [N] its id
    sizes: list[int]  # response tokens of each sequence, N in all


def pad(pairs: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]], multiple: int = 1) -> PaddedBatch:
    """Pads sequences given as (prompt ids, response ids); a prompt has at least one id.

    Args:
        pairs: B pairs of int32 arrays [P] and [T].
        multiple: the padded length is rounded up to it.
    """
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    length = -(-longest // multiple) * multiple
    input_ids = np.zeros((len(pairs), length), dtype=np.int64)
    rows, positions, targets = [], [], []
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : end] = response
        rows.append(np.full(len(response), row, dtype=np.int64))
        # The token at position p is predicted by the logits at p - 1.
        positions.append(np.arange(len(prompt) - 1, end - 1, dtype=np.int64))
        targets.append(response.astype(np.int64))
    position = np.concatenate(positions)
    first, last = (int(position.min()), int(position.max())) if len(position) else (0, 0)
    return PaddedBatch(
        input_ids=input_ids,
        keep=np.arange(first, last + 1, dtype=np.int64),
        rows=np.concatenate(rows),
        columns=position - first,
        targets=np.concatenate(targets),
        sizes=[len(response) for _, response in pairs],
    )


def trained(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with at least one trained token, in order: the others add nothing to any sum."""
    return [sample for sample in samples if sample.trained_tokens]


def shard(items: Sequence[T], rank: int, world: int) -> list[T]:
    """The items of one rank: every ``world``-th, so that neighbours (one prompt group) spread over the ranks."""
    return list(items[rank::world])


def micro_batch_count(items: int, world: int, size: int) -> int:
    """Micro-batches that every rank makes: as many as the rank with the most items needs."""
    return math.ceil(math.ceil(items / world) / size)


def micro_batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Cuts items into pieces of at most ``size``, in order."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
