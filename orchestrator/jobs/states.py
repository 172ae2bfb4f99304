"""The job state machine. Pure: what happened to a job comes in, its next state goes out.

A job is one row with a state and a wish. The state says where it is; the wish is what a user asked of a job whose
process has to end first: a paused job keeps ``running`` until its process has left a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from nightshift.wire.errors import NightshiftError


class JobState(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    RESUMING = "resuming"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Wish(StrEnum):
    """What was asked of a job whose process still runs."""

    NONE = "none"
    PAUSE = "pause"


class Call(StrEnum):
    """What a user asks."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    DELETE = "delete"


class Happening(StrEnum):
    """What is seen of a job's process."""

    LAUNCHED = "launched"  # a process was started
    WORKS = "works"  # its run said "running"
    DONE = "done"  # exit 0
    FAILED = "failed"  # exit 1 or 2: nothing that another attempt would change
    INTERRUPTED = "interrupted"  # exit 130: it was asked to end and left a checkpoint
    VANISHED = "vanished"  # killed, or gone with the machine


#: States without a process that end a job; RESUME leaves them again, except ``succeeded``.
ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
#: States in which the job waits for its turn.
WAITING = frozenset({JobState.QUEUED, JobState.RESUMING})
#: States in which a process of the job runs, or must be assumed to.
ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.CANCELLING})
#: Starts of one job that may vanish in a row, without a step between them, before it counts as failed.
MAX_VANISHED = 3


@dataclass(frozen=True, slots=True)
class Status:
    """State and wish of a job.

    Attributes:
        vanished: processes of the job that vanished since one of them finished a step.
    """

    state: JobState = JobState.QUEUED
    wish: Wish = Wish.NONE
    vanished: int = 0

    @property
    def has_process(self) -> bool:
        """Whether a process of the job may be there."""
        return self.state in ACTIVE


class StateConflictError(NightshiftError):
    """The job's state does not allow the call.

    Attributes:
        state: the state that the job is in.
    """

    def __init__(self, message: str, state: JobState, fix: str = "") -> None:
        super().__init__(message, role="job", fix=fix)
        self.state = state


def ask(status: Status, call: Call) -> Status:
    """The status after a user's call. Asking again for what is under way changes nothing.

    Raises:
        StateConflictError: the state does not allow it; DELETE is allowed where the status comes back unchanged.
    """
    state = status.state
    match call:
        case Call.PAUSE:
            if state is JobState.PAUSED:
                return status
            if state in WAITING:
                return replace(status, state=JobState.PAUSED)
            if state in (JobState.STARTING, JobState.RUNNING):
                return replace(status, wish=Wish.PAUSE)
            raise _conflict(call, status, "only a job that waits or runs can be paused")
        case Call.RESUME:
            if state in WAITING:
                return status
            if state in (JobState.PAUSED, JobState.CANCELLED, JobState.FAILED):
                return Status(JobState.RESUMING)
            if status.wish is Wish.PAUSE:
                raise _conflict(call, status, "it is about to pause: ask again once it is paused")
            raise _conflict(call, status, "only a paused, cancelled or failed job can be resumed")
        case Call.CANCEL:
            if state in (JobState.CANCELLING, JobState.CANCELLED):
                return status
            if state in (JobState.STARTING, JobState.RUNNING):
                return replace(status, state=JobState.CANCELLING, wish=Wish.NONE)
            if state in WAITING or state is JobState.PAUSED:
                return replace(status, state=JobState.CANCELLED, wish=Wish.NONE)
            raise _conflict(call, status, "the job has ended")
        case Call.DELETE:
            if state in ENDED:
                return status
            raise _conflict(call, status, "cancel the job first")


def observe(status: Status, what: Happening) -> Status:
    """The status after something happened to the job's process.

    Raises:
        StateConflictError: it cannot happen in this state (a process of a job that has none).
    """
    state = status.state
    if what is Happening.LAUNCHED:
        if state not in WAITING:
            raise StateConflictError(f"a process was started for a job that is {state}", state)
        return replace(status, state=JobState.STARTING)
    if not status.has_process:
        raise StateConflictError(f"a process of a job that is {state} was seen: {what}", state)
    match what:
        case Happening.WORKS:
            return replace(status, state=JobState.RUNNING) if state is JobState.STARTING else status
        case Happening.DONE:
            return Status(JobState.SUCCEEDED)  # also where it was asked to end: there was nothing left to do
        case Happening.FAILED:
            return Status(JobState.CANCELLED if state is JobState.CANCELLING else JobState.FAILED)
        case Happening.INTERRUPTED:
            return _ended_early(status, replace(status, state=JobState.RESUMING, wish=Wish.NONE))
        case Happening.VANISHED:
            count = status.vanished + 1
            again = JobState.FAILED if count >= MAX_VANISHED else JobState.RESUMING
            return _ended_early(status, Status(again, vanished=count))


def progressed(status: Status) -> Status:
    """The status after a finished step: earlier vanishings do not count any more."""
    return replace(status, vanished=0) if status.vanished else status


def happening(exit_code: int | None) -> Happening:
    """What an exit code of ``nightshift run`` means; None: the process is gone and left none."""
    if exit_code == 0:
        return Happening.DONE
    if exit_code == 130:
        return Happening.INTERRUPTED
    if exit_code is None or exit_code < 0 or exit_code > 128:
        return Happening.VANISHED
    return Happening.FAILED


def _ended_early(status: Status, otherwise: Status) -> Status:
    if status.state is JobState.CANCELLING:
        return Status(JobState.CANCELLED)
    if status.wish is Wish.PAUSE:
        return Status(JobState.PAUSED)
    return otherwise


def _conflict(call: Call, status: Status, why: str) -> StateConflictError:
    pausing = ", and pauses" if status.wish is Wish.PAUSE else ""
    return StateConflictError(f"the job is {status.state}{pausing}, and cannot {call}: {why}", status.state)
