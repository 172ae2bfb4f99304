"""Experience: samples of prompt groups, from the rollout server to the gradient."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
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
    response_text: str = ""
    reward_seconds: float = 0.0
    ref_seconds: float = 0.0
    generate_seconds: float = 0.0

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens that the loss counts."""
        return int(self.loss_mask.sum())

    @property
    def truncated(self) -> bool:
        """Whether the length limit cut the response; follows the finish reason, never a search for EOS."""
        return self.finish_reason == FINISH_LENGTH

    def check(self) -> None:
        """Checks that the arrays belong together.

        Raises:
            WireError: a length differs, a log-prob is positive or not finite, or the version spans leave a gap.
        """
        tokens = len(self.response_ids)
        for name in ("logprobs", "loss_mask", "ref_logprobs", "advantages"):
            value = getattr(self, name)
            if value is not None and value.shape != (tokens,):
                raise WireError(f"sample {self.sample_id}: {name} has shape {value.shape}, expected ({tokens},)")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 0).any():
            raise WireError(f"sample {self.sample_id}: a log-prob is positive or not finite")
        at = 0
        for span in self.versions:
            if span.start != at or span.end < span.start:
                raise WireError(f"sample {self.sample_id}: version spans leave a gap at token {at}")
            at = span.end
        if at != tokens:
            raise WireError(f"sample {self.sample_id}: version spans end at {at} of {tokens} tokens")


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
    return codec.pack([_sample_to_map(sample) for sample in samples])


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
        WireError: malformed message or unknown field.
    """
    try:
        return LossSpec(**codec.unpack(data))
    except TypeError as error:
        raise WireError(f"loss specification: {error}") from error


_SAMPLE_FIELDS = tuple(f.name for f in fields(Sample))


def _sample_to_map(sample: Sample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
    values["versions"] = [[span.version, span.start, span.end] for span in sample.versions]
    return values


def _sample_from_map(values: Any) -> Sample:
    try:
        values = dict(values)
        values["versions"] = [VersionSpan(*span) for span in values["versions"]]
        return Sample(**values)
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"malformed sample: {error}") from error
