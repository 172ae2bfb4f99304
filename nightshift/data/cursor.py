"""The place in the prompts: which row comes next, over epochs, and exactly so after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from nightshift.wire.errors import BadInputError


def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """The shuffled order of one epoch: [size] row indices.

    Rows are sorted by raw 64-bit draws of PCG64, seeded by (seed, epoch). numpy promises that stream for all versions;
    of ``Generator.permutation`` it does not, and a run may be resumed with another version.
    """
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(draws, kind="stable")


def epoch_rows(size: int, parts: Sequence[tuple[int, float]] | None) -> int:
    """Rows of one epoch: all of ``size``, or what the files' weights make of them.

    Args:
        parts: rows and weight of each file, where files have weights.

    Raises:
        BadInputError: the weights leave no row, or belong to other files.
    """
    if parts is None:
        return size
    count = sum(round(weight * rows) for rows, weight in parts)
    if sum(rows for rows, _ in parts) != size or not count:
        raise BadInputError(
            f"data.weights leave no row of {size}, or belong to other files", role="job", fix="Raise a weight"
        )
    return count


def file_weights(
    row_ids: Iterable[str], paths: Sequence[str], weights: Sequence[float] | None
) -> list[tuple[int, float]] | None:
    """Rows and weight of each file, in the order of their rows; None where files have no weights.

    Args:
        row_ids: of the rows that are left, "<prefix>:<number>" with the prefixes of :func:`row_prefixes`.
        paths: of the files.
        weights: ``data.weights``, one for each file.
    """
    if weights is None:
        return None
    kept = Counter(row_id.rpartition(":")[0] for row_id in row_ids)
    # A file of which nothing was kept has no place in the order.
    return [(kept[name], weight) for name, weight in zip(row_prefixes(paths), weights, strict=True) if kept[name]]


def row_prefixes(paths: Sequence[str]) -> list[str]:
    """File names, with the place in the list in front where a name comes twice."""
    names = [Path(path).name for path in paths]
    return [name if names.count(name) == 1 else f"{place}/{name}" for place, name in enumerate(names)]


def mixed_rows(parts: Sequence[tuple[int, float]], seed: int, epoch: int, shuffle: bool) -> NDArray[np.intp]:
    """The rows of one epoch where files have weights, file by file: [M] row indices, before the epoch's shuffle.

    A file of n rows and weight w gives round(w n) rows an epoch: each of them floor(w) times, and of the rest the next
    part of a walk that goes on through the epochs, so that every row has its turn.

    Args:
        parts: rows and weight of each file, in the order of the rows.
        shuffle: whether each such walk through a file has an order of its own.
    """
    found: list[NDArray[np.intp]] = []
    start = 0
    for number, (rows, weight) in enumerate(parts):
        count = round(weight * rows)
        begin = epoch * count
        walks: dict[int, NDArray[np.intp]] = {}
        picked = np.empty(count, np.intp)
        for at in range(count):
            walk, place = divmod(begin + at, rows)
            if walk not in walks:
                walks[walk] = epoch_order(rows, seed + 7919 * (number + 1), walk) if shuffle else np.arange(rows)
            picked[at] = start + walks[walk][place]
        found.append(picked)
        start += rows
    return np.concatenate(found)


class Cursor:
    """Walks over ``size`` rows, epoch after epoch, without end.

    Args:
        size: number of rows.
        seed: seed of the order, 0 or more.
        shuffle: False keeps the rows' own order in every epoch.
        parts: rows and weight of each file, where files have weights; an epoch then holds a file's rows that often.
        keys: of an epoch: [size] numbers by which its rows are sorted, lowest first; equal ones keep their order.

    Raises:
        BadInputError: there are no rows, or none is left by the weights.
    """

    def __init__(
        self,
        size: int,
        seed: int = 0,
        shuffle: bool = True,
        *,
        parts: Sequence[tuple[int, float]] | None = None,
        keys: Callable[[int], NDArray[np.float64]] | None = None,
    ) -> None:
        if size < 1:
            raise BadInputError("there are no prompts to walk over", role="job")
        epoch_rows(size, parts)
        self._parts, self._keys = parts, keys
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._epoch, self._offset = 0, 0
        self._order = self._make_order()

    @property
    def epoch(self) -> int:
        """Epoch of the row that comes next."""
        return self._epoch

    def next(self) -> tuple[int, int]:
        """Epoch and index of the next row."""
        epoch, index = self._epoch, int(self._order[self._offset])
        self._offset += 1
        if self._offset == len(self._order):
            self._epoch, self._offset = epoch + 1, 0
            self._order = self._make_order()
        return epoch, index

    def state(self) -> dict[str, Any]:
        """The place as plain values, for a checkpoint's manifest."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch_rows": len(self._order),
            **({"weights": [weight for _, weight in self._parts]} if self._parts is not None else {}),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks that a place was saved over the same rows in the same order.

        Raises:
            BadInputError: it was not: the same place would be another row.
        """
        weights = None if self._parts is None else [weight for _, weight in self._parts]
        own = (("size", self._size), ("seed", self._seed), ("shuffle", self._shuffle), ("weights", weights))
        for name, now in own:
            if state.get(name) != now:
                raise BadInputError(
                    f"the prompt cursor was saved with {name} {state.get(name)!r}, the job now has {now!r}",
                    role="job",
                    fix="Resume with the same data files, data settings and trainer.seed",
                )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved place.

        Raises:
            BadInputError: the state is malformed, or was saved over other data.
        """
        self.check(state)
        epoch, offset = state.get("epoch"), state.get("offset")
        if not (_is_count(epoch) and _is_count(offset)):
            raise BadInputError(f"the saved prompt cursor is malformed: epoch {epoch!r}, offset {offset!r}", role="job")
        self._epoch = epoch
        order = self._make_order()
        if offset >= len(order):
            raise BadInputError(f"the saved prompt cursor is malformed: epoch {epoch!r}, offset {offset!r}", role="job")
        self._offset, self._order = offset, order

    def _make_order(self) -> NDArray[np.intp]:
        if self._parts is None:
            rows = np.arange(self._size)
        else:
            rows = mixed_rows(self._parts, self._seed, self._epoch, self._shuffle)
        order = rows[epoch_order(len(rows), self._seed, self._epoch)] if self._shuffle else rows
        if self._keys is not None:
            order = order[np.argsort(self._keys(self._epoch)[order], kind="stable")]
        return order


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
