"""What is asked of a rollout server, what comes back, and the checks of vLLM's own JSON answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightshift.wire.errors import RoleError, RoleTimeoutError
from nightshift.wire.experience import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Floats, Ids, VersionSpan

#: A log-prob may exceed 0 by rounding alone; more than this is a broken server.
ROUNDING = 1e-4
#: Beyond it a float32 is infinite, and an int32 holds no id.
_LARGEST, _MOST_IDS = float(np.finfo(np.float32).max), 1 << 31


class EngineAwayError(RoleError):
    """The server did not answer, or answered that it cannot now: the request may be sent again.

    Attributes:
        lost: there was no connection, or one to another start of the server.
        partial: what had come in of the response.
    """

    def __init__(self, message: str, *, lost: bool = False, partial: Generated | None = None) -> None:
        super().__init__(message, role="rollout")
        self.lost = lost
        self.partial = partial


class LeaseOverError(EngineAwayError):
    """The server works for a newer lease: this run has it no more, and learns so from its leases' file soon."""


class EngineLateError(RoleTimeoutError):
    """The server did not answer within the time of one request; ``partial`` is what had come in of the response."""

    def __init__(self, message: str, *, partial: Generated | None = None) -> None:
        super().__init__(message, role="rollout")
        self.partial = partial


class AsleepError(RoleTimeoutError):
    """The server failed to sleep or to wake: what memory it holds is unknown, and only another start of it helps."""


class EngineRefusedError(RoleError):
    """The server refused the request itself (4xx): sending it again would not help."""


class InvalidAnswerError(RoleError):
    """The server answered with something that cannot be trained on.

    Attributes:
        kind: what it is counted as.
        partial: tokens before it that can be.
    """

    def __init__(self, message: str, kind: str, *, partial: Generated | None = None) -> None:
        super().__init__(message, role="rollout")
        self.kind = kind
        self.partial = partial


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sample to be drawn."""

    request_id: str
    prompt_ids: Ids  # [P] int32
    max_tokens: int
    temperature: float  # 0 is greedy
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """One drawn response of T tokens."""

    response_ids: Ids  # [T] int32
    logprobs: Floats  # [T] float32
    versions: list[VersionSpan]
    finish_reason: str  # FINISH_ABORT: there is no end yet


def parse_generated(answer: dict[str, Any], request_id: str, most: int | None = None) -> Generated:
    """Checks and reads the answer to a generate request.

    Args:
        most: tokens that were asked for; None: any number.

    Raises:
        InvalidAnswerError: wrong request id, more tokens than were asked for, log-probs that are missing, null,
            positive or not one per token, ids that disagree with the log-probs', version spans that leave a gap, an
            unknown finish reason.
        EngineAwayError: the server aborted the request.
    """
    answered = str(answer.get("request_id", ""))
    if answered.removeprefix("generate-tokens-") != request_id:
        raise InvalidAnswerError(f"asked for {request_id}, answered {answered!r}", "request_id")
    try:
        choice = _only_choice(answer, request_id)
        if choice.get("finish_reason") == FINISH_ABORT:
            raise EngineAwayError(f"{request_id} was aborted by the server")
        if choice.get("finish_reason") not in (FINISH_STOP, FINISH_LENGTH):
            raise InvalidAnswerError(f"{request_id}: finish reason {choice.get('finish_reason')!r}", "finish_reason")
        ids = choice.get("token_ids") or []
        if any(type(token) is not int or not 0 <= token < _MOST_IDS for token in ids):
            raise InvalidAnswerError(f"{request_id}: token ids {str(ids)[:300]}", "token_ids")
        check_length(request_id, len(ids), most)
        return Generated(
            response_ids=np.array(ids, dtype=np.int32),
            logprobs=_logprobs(choice, ids, request_id),
            versions=_spans(choice, len(ids), request_id),
            finish_reason=str(choice["finish_reason"]),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise InvalidAnswerError(f"{request_id}: malformed answer: {type(error).__name__}: {error}", "form") from error


def parse_prompt_logprobs(rows: Any, ids: Sequence[int], first: int) -> Floats:
    """Reads vLLM's ``prompt_logprobs``.

    Args:
        rows: one for each id.
        ids: of the whole sequence.
        first: position of the first id that is asked about.

    Returns:
        [len(ids) - first] float32, which may hold NaN and infinities.

    Raises:
        InvalidAnswerError: there are more or fewer rows, or one holds no number for its id.
    """
    try:
        if len(rows) != len(ids):
            raise InvalidAnswerError(f"scored {len(rows)} of {len(ids)} tokens", "probe")
        values = [float(rows[at][str(ids[at])]["logprob"]) for at in range(first, len(ids))]
        with np.errstate(over="ignore"):  # beyond a float32 it is infinite
            return np.array(values, np.float64).astype(np.float32)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InvalidAnswerError("left out the log-prob of a token", "probe") from error


def check_length(request_id: str, tokens: int, most: int | None) -> None:
    """Refuses more tokens than were asked for: the memory of a run is laid out for these, and an endless answer ends.

    Raises:
        InvalidAnswerError: there are more.
    """
    if most is not None and tokens > most:
        raise InvalidAnswerError(f"{request_id}: {tokens} tokens, and {most} were asked for", "length")


def _only_choice(answer: dict[str, Any], request_id: str) -> dict[str, Any]:
    choices = answer.get("choices") or []
    if len(choices) != 1:
        raise InvalidAnswerError(f"{request_id}: {len(choices)} choices for one sample", "choices")
    return dict(choices[0])


def _logprobs(choice: dict[str, Any], ids: list[int], request_id: str) -> Floats:
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(ids):
        raise InvalidAnswerError(f"{request_id}: {len(content)} log-probs for {len(ids)} tokens", "logprobs")
    values = [entry.get("logprob") for entry in content]
    for value in values:
        if not isinstance(value, int | float) or not -_LARGEST <= value <= ROUNDING:  # neither for a NaN
            raise InvalidAnswerError(f"{request_id}: log-prob {str(value)[:40]}", "logprobs")
    if any(entry.get("token_id", token) != token for entry, token in zip(content, ids, strict=True)):
        raise InvalidAnswerError(f"{request_id}: log-probs of other tokens than the sampled ones", "logprobs")
    return np.minimum(np.array(values, dtype=np.float32), np.float32(0))


def _spans(choice: dict[str, Any], tokens: int, request_id: str) -> list[VersionSpan]:
    spans = [
        VersionSpan(str(span["version"]), int(span["start"]), int(span["end"]))
        for span in choice.get("weight_versions") or []
    ]
    ends = [0, *(span.end for span in spans)]
    if tokens and (ends[-1] != tokens or any(span.start != at for span, at in zip(spans, ends, strict=False))):
        raise InvalidAnswerError(f"{request_id}: version spans {spans} for {tokens} tokens", "versions")
    return spans
