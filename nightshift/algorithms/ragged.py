"""Sequences of different length, with holes, as one dense array; and the backward recursions over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]

#: Tokens that one matrix product of :func:`suffix_sums` covers.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the unmasked tokens of N sequences lie: packed to the left into rows of length L.

    Attributes:
        lengths: [N] number of tokens of each sequence, masked ones included.
        places: per sequence the indices of its unmasked tokens, or None where none is masked.
        counts: [N] number of unmasked tokens.
    """

    lengths: tuple[int, ...]
    places: tuple[NDArray[np.intp] | None, ...]
    counts: NDArray[np.intp]

    @classmethod
    def of(cls, masks: Sequence[ArrayLike]) -> Layout:
        """The layout of masks [T_i], 1 where the policy sampled the token."""
        lengths, places = [], []
        for mask in masks:
            array = np.asarray(mask)
            if array.ndim != 1:
                raise ValueError(f"a mask has shape {array.shape}, expected one dimension")
            lengths.append(len(array))
            found = np.flatnonzero(array > 0)
            places.append(None if len(found) == len(array) else found)
        counts = [length if place is None else len(place) for length, place in zip(lengths, places, strict=True)]
        return cls(tuple(lengths), tuple(places), np.array(counts, np.intp))

    @property
    def width(self) -> int:
        """L: the largest number of unmasked tokens."""
        return int(self.counts.max(initial=0))

    def pack(self, arrays: Sequence[ArrayLike]) -> Doubles:
        """Unmasked tokens of arrays [T_i] as float64 [N, L], 0 beyond each sequence's end.

        Raises:
            ValueError: an array has another length than its mask.
        """
        out = np.zeros((len(self.lengths), self.width))
        for row, array in enumerate(arrays):
            values, place = np.asarray(array), self.places[row]
            if values.shape != (self.lengths[row],):
                raise ValueError(f"array {row} has shape {values.shape}, its mask ({self.lengths[row]},)")
            out[row, : self.counts[row]] = values if place is None else values[place]
        return out

    def unpack(self, packed: Doubles) -> list[Doubles]:
        """[N, L] back to one array [T_i] per sequence, 0 where masked."""
        result = []
        for row, (length, place) in enumerate(zip(self.lengths, self.places, strict=True)):
            out = np.zeros(length)
            out[slice(None) if place is None else place] = packed[row, : self.counts[row]]
            result.append(out)
        return result

    def following(self, packed: Doubles, last: Doubles) -> Doubles:
        """Each token's successor in [N, L]: the next unmasked token's value, and ``last`` [N] after the last one."""
        out = np.zeros_like(packed)
        out[:, :-1] = packed[:, 1:]
        rows = np.flatnonzero(self.counts > 0)
        out[rows, self.counts[rows] - 1] = last[rows]
        return out


def suffix_sums(values: Doubles, factor: float) -> Doubles:
    """a_t = x_t + factor * a_(t+1) along the rows of [N, L].

    In blocks of tokens: inside a block the recursion is one product with a triangular matrix of powers of ``factor``;
    only the carry from block to block is sequential, so that a batch of long sequences costs few interpreter steps.
    """
    rows, width = values.shape
    if factor == 0.0 or width == 0:
        return values.copy()
    out = np.empty_like(values)
    distance = np.arange(_BLOCK)[:, None] - np.arange(_BLOCK)[None, :]
    powers = np.where(distance >= 0, float(factor) ** np.maximum(distance, 0), 0.0)
    decay = float(factor) ** np.arange(_BLOCK, 0, -1)
    carry = np.zeros(rows)
    end = width
    while end > 0:
        start = max(0, end - _BLOCK)
        size = end - start
        block = values[:, start:end] @ powers[:size, :size]
        block += carry[:, None] * decay[_BLOCK - size :]
        out[:, start:end] = block
        carry = block[:, 0]
        end = start
    return out


def suffix_recursion(values: Doubles, factors: Doubles) -> Doubles:
    """a_t = x_t + c_t * a_(t+1) along the rows of [N, L], with a factor per token."""
    # Tokens become rows, so that each step of the recursion reads and writes contiguous memory.
    by_token, factor_by_token = values.T.copy(order="C"), np.ascontiguousarray(factors.T)
    for token in range(len(by_token) - 2, -1, -1):
        by_token[token] += factor_by_token[token] * by_token[token + 1]
    return np.ascontiguousarray(by_token.T)
