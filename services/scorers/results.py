"""What the built-in rewards share: texts of samples and results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nightshift.wire.scoring import RewardResult


def prompt_text(prompt: Any) -> str:
    """A prompt as one text: itself, or the turns of its messages."""
    if isinstance(prompt, str) or prompt is None:
        return prompt or ""
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt if isinstance(turn, dict))


def result(
    sample: Mapping[str, Any], score: float | None, began: float, kind: str = "", error: str = ""
) -> RewardResult:
    """One sample's result; ``kind`` and ``error`` say why there is no score."""
    seconds = time.perf_counter() - began
    return RewardResult(id=sample["id"], score=score, parts={}, error_type=kind, error=error, seconds=seconds)
