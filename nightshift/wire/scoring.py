"""What goes to a scorer and what comes back, as maps that any language can write."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


class RewardInput(TypedDict):
    """One response to be rewarded. Column values of the data row are passed as they are."""

    id: str
    prompt: Any  # the row's prompt: text or message list
    response: str  # decoded response without special tokens
    response_ids: Ids
    ground_truth: Any
    data_source: str | None
    extra_info: Any
    finish_reason: str


class RewardResult(TypedDict):
    """Reward of one response. ``score`` is None where the sample could not be scored; then ``error_type`` says why."""

    id: str
    score: float | None
    parts: dict[str, float]
    error_type: str  # "", "raised", "timeout", "type", "not_finite", "none"
    error: str  # message with the first traceback, empty where there is none
    seconds: float


class SequenceInput(TypedDict):
    """One sequence on which log-probs (or values) of the response tokens are wanted."""

    id: str
    prompt_ids: Ids  # [P] int32
    response_ids: Ids  # [T] int32
    temperature: NotRequired[float]  # divides the logits; 1.0 where absent


class SequenceResult(TypedDict):
    """Log-probs of the response tokens under the model, or values at them: float32 of shape [T]."""

    id: str
    logprobs: Floats
    token_ids: NotRequired[Ids]  # echoed response ids, so that the caller can check the alignment
    tensors: NotRequired[list[dict[str, Any]]]  # of the call's first result: name, shape, dtype and device in the model
