"""Experience: samples of prompt groups, from the rollout server to the gradient."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.wire import codec
from nightshift.wire.errors import WireError

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.uint8]

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled by policy ``version``."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Sample:
    """One response to one prompt, with everything that training on it needs.

    P is the number of prompt tokens, T the number of response tokens.
    """

    sample_id: str  # "<group id>.<slot>"
    group_id: str
    trace_id: str  # of the prompt group, 32 hex digits
    prompt_ids: Ids  # [P] int32
    response_ids: Ids  # [T] int32, as sampled; never re-tokenised
    logprobs: Floats  # [T] float32, log mu(token) of the distribution that was sampled from
    loss_mask: Mask  # [T] 1 where the policy sampled the token
    versions: list[VersionSpan]
    finish_reason: str  # FINISH_STOP, FINISH_LENGTH or FINISH_ABORT
    reward: float | None = None  # None: unscored; never a score of 0 in its place
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str = ""  # "" or the error type of nightshift.wire.scoring.RewardResult
    ref_logprobs: Floats | None = None  # [T] float32
    advantages: Floats | None = None  # [T] float32, 0 where masked
    values: Floats | None = None  # [T] float32, the critic's V of the state before each token
    bootstrap_value: float = 0.0  # V after the last token; 0 where nothing follows
    returns: Floats | None = None  # [T] float32, what the critic is trained towards, 0 where masked
    teacher_logprobs: Floats | None = None  # [T] float32, of the teacher of a distillation
    response_text: str = ""
    reward_seconds: float = 0.0
    ref_seconds: float = 0.0
    value_seconds: float = 0.0
    generate_seconds: float = 0.0
    peak_memory_bytes: int = 0  # highest resident memory of a scorer that scored it; 0: none says

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens that the loss counts."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def truncated(self) -> bool:
        """Whether the length limit cut the response; follows the finish reason, never a search for EOS."""
        return self.finish_reason == FINISH_LENGTH

    def check(self) -> None:
        """Checks that the arrays belong together.

        Raises:
            WireError: a field has another type or an array another shape than it must have, a log-prob is positive or
                not finite, a reference log-prob or an advantage is not finite, a mask is not 0 or 1, the finish reason
                is unknown, or the version spans leave a gap.
        """
        for name in ("sample_id", "group_id", "trace_id", "finish_reason", "reward_error", "response_text"):
            if not isinstance(getattr(self, name), str):
                raise WireError(f"sample {self.sample_id}: {name} is {type(getattr(self, name)).__name__}, not text")
        if self.finish_reason not in (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT):
            raise WireError(f"sample {self.sample_id}: unknown finish reason {self.finish_reason!r}")
        if self.reward is not None and (
            isinstance(self.reward, bool) or not isinstance(self.reward, int | float | np.number)
        ):
            raise WireError(f"sample {self.sample_id}: reward is {type(self.reward).__name__}, not a number")
        for name, kind in _ARRAYS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_ARRAYS:
                continue
            if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kind:
                raise WireError(f"sample {self.sample_id}: {name} is {_describe(value)}")
            if name != "prompt_ids" and len(value) != len(self.response_ids):
                raise WireError(
                    f"sample {self.sample_id}: {name} has shape {value.shape}, expected {self.response_ids.shape}"
                )
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 0).any():
            raise WireError(f"sample {self.sample_id}: a log-prob is positive or not finite")
        for name in _OPTIONAL_ARRAYS:
            value = getattr(self, name)
            if value is not None and not np.isfinite(value).all():
                raise WireError(f"sample {self.sample_id}: a value of {name} is not finite")
        if not np.isin(self.loss_mask, (0, 1)).all():
            raise WireError(f"sample {self.sample_id}: loss_mask holds something else than 0 and 1")
        at = 0
        for span in self.versions:
            if type(span.start) is not int or type(span.end) is not int or not isinstance(span.version, str):
                raise WireError(f"sample {self.sample_id}: malformed version span {span}")
            if span.start != at or span.end < span.start:
                raise WireError(f"sample {self.sample_id}: version spans leave a gap at token {at}")
            at = span.end
        if at != len(self.response_ids):
            raise WireError(f"sample {self.sample_id}: version spans end at {at} of {len(self.response_ids)} tokens")


#: Kinds of dtype (numpy's letters) that each array of a sample may have; all have one dimension.
_ARRAYS = {
    "prompt_ids": "iu",
    "response_ids": "iu",
    "logprobs": "f",
    "loss_mask": "uib",
    "ref_logprobs": "f",
    "advantages": "f",
    "values": "f",
    "returns": "f",
    "teacher_logprobs": "f",
}
_OPTIONAL_ARRAYS = ("ref_logprobs", "advantages", "values", "returns", "teacher_logprobs")


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    return type(value).__name__


@dataclass(slots=True)
class LossSpec:
    """What the trainer computes on an update, with the denominators of the whole batch.

    Parts of a batch carry partial sums: the trainer divides by these totals, not by what one part holds, so that the
    gradient of the parts together is the full batch's.
    """

    policy_loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    aggregation: str = "token_mean"
    temperature: float = 1.0
    total_tokens: int = 0  # trained tokens of the whole batch; what token_mean divides by
    total_sequences: int = 0  # samples of the whole batch with at least one trained token
    constant_length: int = 0  # divisor of "constant_length" aggregation
    options: dict[str, float] = field(default_factory=dict)  # further parameters of the named loss


def pack_samples(samples: list[Sample]) -> bytes:
    """Encodes samples for the wire."""
    return codec.pack_known([_sample_to_map(sample) for sample in samples])


def unpack_samples(data: bytes) -> list[Sample]:
    """Decodes and checks samples.

    Raises:
        WireError: malformed message, unknown or missing field, or arrays that do not belong together.
    """
    maps = codec.unpack(data)
    if not isinstance(maps, list):
        raise WireError(f"expected a list of samples, got {type(maps).__name__}")
    samples = [_sample_from_map(item) for item in maps]
    for sample in samples:
        sample.check()
    return samples


def pack_loss(spec: LossSpec) -> bytes:
    """Encodes a loss specification."""
    return codec.pack(asdict(spec))


def unpack_loss(data: bytes) -> LossSpec:
    """Decodes a loss specification.

    Raises:
        WireError: malformed message, unknown field or a value of another type.
    """
    values = codec.unpack(data)
    if not isinstance(values, dict):
        raise WireError(f"loss specification: {type(values).__name__}, expected a map")
    try:
        spec = LossSpec(**values)
    except TypeError as error:
        raise WireError(f"loss specification: {error}") from error
    for name, default in asdict(LossSpec()).items():
        value = getattr(spec, name)
        allowed = (int, float) if isinstance(default, float) else (type(default),)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise WireError(f"loss specification: {name} is {value!r}, expected {type(default).__name__}")
    return spec


_SAMPLE_FIELDS = tuple(f.name for f in fields(Sample))
_values_of = attrgetter(*_SAMPLE_FIELDS)


def _sample_to_map(sample: Sample) -> dict[str, Any]:
    values = dict(zip(_SAMPLE_FIELDS, _values_of(sample), strict=True))
    values["versions"] = [[span.version, span.start, span.end] for span in sample.versions]
    return values


def _sample_from_map(values: Any) -> Sample:
    try:
        values = dict(values)
        values["versions"] = [VersionSpan(*span) for span in values["versions"]]
        return Sample(**values)
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"malformed sample: {type(error).__name__}: {error}") from error
