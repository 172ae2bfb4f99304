"""From samples to micro-batches of token ids, in numpy: padded or packed.

A row of a batch holds one prompt and one or more responses to it: the samples of a prompt group then pay for their
prompt once, which is most of the work where answers are short. Each response sees the prompt and itself, at the
positions that it would have alone, so that values equal those of separate sequences up to rounding. Rows are padded on
the right, where no real token looks.

Packed, the sequences lie end to end in one row, without padding: attention must then be told where each begins
(:mod:`services.trainer.packed_attention`), and prompts are not shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nightshift.wire.experience import Sample

T = TypeVar("T")
Longs = NDArray[np.int64]
Pair = tuple[NDArray[np.int32], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of length L, and where the N response tokens of all sequences are predicted.

    Logits are wanted only at the columns ``keep`` (K of them): padded, from the first one that predicts a response
    token to the last one; packed, those that do. The last token of a response predicts nothing and is left out of the
    input.
    """

    input_ids: Longs  # [B, L]
    keep: Longs  # [K] columns of input_ids
    rows: Longs  # [N] row of each response token
    columns: Longs  # [N] index into ``keep`` of the position that predicts it
    targets: Longs  # [N] its id
    sizes: list[int]  # response tokens of each sequence, N in all
    position_ids: Longs | None  # [B, L]; None: plain sequences, one in each row
    visible: NDArray[np.bool_] | None  # [B, L, L], true where the row's token i sees token j; None: causal
    starts: NDArray[np.int32] | None = None  # packed: [S + 1] column at which each sequence begins, and L; None: padded


def pad(pairs: Sequence[Pair], share: bool = False) -> Batch:
    """Lays sequences given as (prompt ids, response ids) out in rows; a prompt has at least one id.

    Args:
        pairs: int32 arrays [P] and [T].
        share: neighbours with the same prompt share a row.
    """
    groups = _group(pairs) if share else [(prompt, [response]) for prompt, response in pairs]
    shared = any(len(responses) > 1 for _, responses in groups)
    lengths = [len(prompt) + sum(max(0, len(r) - 1) for r in responses) for prompt, responses in groups]
    shape = (len(groups), max(lengths))
    input_ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)  # 0: prompt, then 1, 2, ...: responses; -1: padding
    rows, predictors, targets = [], [], []
    for row, (prompt, responses) in enumerate(groups):
        at = len(prompt)
        input_ids[row, :at], positions[row, :at], segments[row, :at] = prompt, np.arange(at), 0
        for number, response in enumerate(responses, start=1):
            inner = max(0, len(response) - 1)
            here = slice(at, at + inner)
            input_ids[row, here] = response[:inner]
            positions[row, here] = len(prompt) + np.arange(inner)
            segments[row, here] = number
            rows.append(np.full(len(response), row, np.int64))
            # The prompt's last token predicts the first of each response, every other token the one after it.
            predictors.append(np.concatenate([[len(prompt) - 1], np.arange(at, at + inner)])[: len(response)])
            targets.append(response.astype(np.int64))
            at += inner
    predictor = np.concatenate(predictors).astype(np.int64)
    first, last = (int(predictor.min()), int(predictor.max())) if len(predictor) else (0, 0)
    return Batch(
        input_ids=input_ids,
        keep=np.arange(first, last + 1, dtype=np.int64),
        rows=np.concatenate(rows),
        columns=predictor - first,
        targets=np.concatenate(targets),
        sizes=[len(response) for _, response in pairs],
        position_ids=positions if shared else None,
        visible=_visible(segments) if shared else None,
    )


def pack(pairs: Sequence[Pair]) -> Batch:
    """Lays sequences given as (prompt ids, response ids) end to end in one row; a prompt has at least one id.

    Args:
        pairs: int32 arrays [P] and [T].
    """
    pieces = [np.concatenate([prompt, response[:-1]]) for prompt, response in pairs]
    starts = np.cumsum([0, *map(len, pieces)])
    sizes = [len(response) for _, response in pairs]
    keep = [
        np.arange(size) + start + len(prompt) - 1
        for (prompt, _), size, start in zip(pairs, sizes, starts[:-1], strict=True)
    ]
    return Batch(
        input_ids=np.concatenate(pieces).astype(np.int64)[None],
        keep=np.concatenate(keep).astype(np.int64),
        rows=np.zeros(sum(sizes), np.int64),
        columns=np.arange(sum(sizes), dtype=np.int64),
        targets=np.concatenate([response for _, response in pairs]).astype(np.int64),
        sizes=sizes,
        position_ids=np.concatenate([np.arange(len(piece)) for piece in pieces]).astype(np.int64)[None],
        visible=None,
        starts=starts.astype(np.int32),
    )


def trained(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with at least one trained token, in order: the others add nothing to any sum."""
    return [sample for sample in samples if sample.trained_tokens]


def shard(items: Sequence[T], rank: int, world: int) -> list[T]:
    """The items of one rank: a run of neighbours, so that prompt groups stay together; the runs differ by one item."""
    return list(items[len(items) * rank // world : len(items) * (rank + 1) // world])


def micro_batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Cuts items into pieces of at most ``size``, in order."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def plan(
    lengths: Sequence[int], world: int, size: int, max_tokens: int | None, packed: bool = False
) -> list[list[list[int]]]:
    """Which items each rank takes in which micro-batch.

    Args:
        lengths: tokens of each item, of all ranks.
        world: number of ranks; each has the items of :func:`shard`.
        size: most items of a micro-batch, where ``max_tokens`` is None.
        max_tokens: most tokens of a micro-batch with its padding; a longer item is alone in its own.
        packed: there is no padding.

    Returns:
        For each rank its micro-batches, as indices into ``lengths``: every index of the rank's share once. Ranks may
        have different numbers of them.
    """
    shares = [shard(range(len(lengths)), rank, world) for rank in range(world)]
    if max_tokens is None:
        return [list(micro_batches(share, size)) for share in shares]
    return [_by_tokens(share, lengths, max_tokens, packed) for share in shares]


def _by_tokens(share: Sequence[int], lengths: Sequence[int], max_tokens: int, packed: bool) -> list[list[int]]:
    """Longest first, so that neighbours need little padding, and a pass that does not fit into memory comes first."""
    pieces: list[list[int]] = []
    used = 0  # tokens of the last piece, were it given this item
    for index in sorted(share, key=lambda item: -lengths[item]):
        used += lengths[index] if packed or not pieces else lengths[pieces[-1][0]]
        if pieces and used <= max_tokens:
            pieces[-1].append(index)
        else:
            pieces.append([index])
            used = lengths[index]
    return pieces


def _group(pairs: Sequence[Pair]) -> list[tuple[NDArray[np.int32], list[NDArray[np.int32]]]]:
    groups: list[tuple[NDArray[np.int32], list[NDArray[np.int32]]]] = []
    for prompt, response in pairs:
        if groups and np.array_equal(groups[-1][0], prompt):
            groups[-1][1].append(response)
        else:
            groups.append((prompt, [response]))
    return groups


def _visible(segments: Longs) -> NDArray[np.bool_]:
    length = segments.shape[1]
    causal = np.tril(np.ones((length, length), np.bool_))
    key, query = segments[:, None, :], segments[:, :, None]
    # Padding sees the prompt, so that no row of the softmax is empty; nothing sees padding.
    return causal & ((key == 0) | ((key == query) & (key > 0)))
