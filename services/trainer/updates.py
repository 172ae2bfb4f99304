"""Which part of which update is taken: a pure state machine, so that a retry never applies a step twice.

An update of step s comes as parts 0, 1, ... of an attempt; the last one is final and applies the step. A repeated part
gets its earlier answer. A newer attempt at the open step starts again at part 0 and drops what the older one added.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nightshift.wire.errors import RoleError, VersionConflictError

Answer = TypeVar("Answer")


class OrderError(RoleError):
    """A part or attempt came out of order."""


@dataclass(frozen=True, slots=True)
class PartKey:
    """Names one part of one attempt at one step."""

    step: int  # counted from 1
    attempt: int
    part: int  # counted from 0

    def __str__(self) -> str:
        return f"step {self.step}, attempt {self.attempt}, part {self.part}"


@dataclass(slots=True)
class _Open:
    """The attempt that parts are added to."""

    step: int
    attempt: int
    new_version: str
    next_part: int = 0


@dataclass(slots=True)
class UpdateLog(Generic[Answer]):
    """State of the weights and of the update that is being put together.

    The owner asks :meth:`answer_to` first, then :meth:`admit`, does the work, and calls :meth:`added` or
    :meth:`applied`, or :meth:`abandoned` when the work failed. One part at a time.
    """

    version: str = ""  # of the weights
    _open: _Open | None = None
    _last_step: int = 0
    _last_attempt: int = 0
    _dirty: bool = False  # gradients are held that no open attempt owns
    _answers: dict[PartKey, Answer] = field(default_factory=dict)

    def answer_to(self, key: PartKey) -> Answer | None:
        """The earlier answer to this part, if it was taken before."""
        return self._answers.get(key)

    def admit(self, key: PartKey, expect_version: str, new_version: str) -> bool:
        """Takes a part that has no answer yet.

        Returns:
            Whether accumulated gradients must be discarded first.

        Raises:
            VersionConflictError: the weights have another version; both are named.
            OrderError: the part or the attempt is not the one whose turn it is.
        """
        if expect_version != self.version:
            applied = f", made by step {self._last_step}, attempt {self._last_attempt}" if self._last_step else ""
            raise VersionConflictError(
                f"the weights have version {self.version!r}{applied}; {key} expects {expect_version!r}",
                role="trainer",
                fix="Load the checkpoint of the expected version, or go on from the present one",
            )
        if key.step <= self._last_step:
            raise _order(f"{key} comes after step {self._last_step} was applied")
        at = self._open
        if at is not None and key.step != at.step:
            raise _order(f"{key} comes while step {at.step}, attempt {at.attempt} is open")
        if at is not None and key.attempt < at.attempt:
            raise _order(f"{key} was superseded by attempt {at.attempt}")
        if at is None or key.attempt > at.attempt:
            if key.part != 0:
                raise _order(f"{key} comes first of its attempt, expected part 0")
            discard = self._dirty or at is not None
            self._open = _Open(key.step, key.attempt, new_version)
            self._dirty = False
            self._answers = {known: answer for known, answer in self._answers.items() if known.step <= self._last_step}
            return discard
        if key.part != at.next_part:
            raise _order(f"{key} is out of order, expected part {at.next_part}")
        if new_version != at.new_version:
            raise _order(f"{key} makes version {new_version!r}, the parts before it {at.new_version!r}")
        return False

    def added(self, key: PartKey, answer: Answer) -> None:
        """The part's gradient was accumulated."""
        if self._open is None:
            raise ValueError(f"{key} was added to no open attempt")
        self._open.next_part = key.part + 1
        self._answers[key] = answer

    def applied(self, key: PartKey, answer: Answer) -> None:
        """The final part was accumulated and the step applied (or skipped, with nothing to train on)."""
        if self._open is None:
            raise ValueError(f"{key} was applied to no open attempt")
        self.version = self._open.new_version
        self._open = None
        self._last_step, self._last_attempt = key.step, key.attempt
        self._answers = {known: value for known, value in self._answers.items() if known.step == key.step}
        self._answers[key] = answer

    def abandoned(self) -> None:
        """The open attempt failed; a new attempt starts from nothing."""
        self._dirty = self._dirty or self._open is not None
        self._open = None

    def reset(self, version: str) -> None:
        """The weights were set from outside: nothing is open, nothing has been answered."""
        self.version = version
        self._open = None
        self._last_step = self._last_attempt = 0
        self._answers = {}


def _order(message: str) -> OrderError:
    return OrderError(message, role="trainer", fix="Repeat the step with a new attempt, from part 0")
