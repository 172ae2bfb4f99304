"""The place in the prompts: which row comes next, over epochs, and exactly so after a resume."""

from __future__ import annotations

from collections.abc import Mapping
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


class Cursor:
    """Walks over ``size`` rows, epoch after epoch, without end.

    Args:
        size: number of rows.
        seed: seed of the order, 0 or more.
        shuffle: False keeps the rows' own order in every epoch.

    Raises:
        BadInputError: there are no rows.
    """

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
        if size < 1:
            raise BadInputError("there are no prompts to walk over", role="job")
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
        if self._offset == self._size:
            self._epoch, self._offset = epoch + 1, 0
            self._order = self._make_order()
        return epoch, index

    def state(self) -> dict[str, int | bool]:
        """The place as plain values, for a checkpoint's manifest."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved place.

        Raises:
            BadInputError: the state is malformed, or was saved over other data: the same place would be another row.
        """
        for name, now in (("size", self._size), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state.get(name) != now:
                raise BadInputError(
                    f"the prompt cursor was saved with {name} {state.get(name)!r}, the job now has {now!r}",
                    role="job",
                    fix="Resume with the same data files, data settings and trainer.seed",
                )
        epoch, offset = state.get("epoch"), state.get("offset")
        if not (_is_count(epoch) and _is_count(offset) and offset < self._size):
            raise BadInputError(f"the saved prompt cursor is malformed: epoch {epoch!r}, offset {offset!r}", role="job")
        self._epoch, self._offset = epoch, offset
        self._order = self._make_order()

    def _make_order(self) -> NDArray[np.intp]:
        return epoch_order(self._size, self._seed, self._epoch) if self._shuffle else np.arange(self._size)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
