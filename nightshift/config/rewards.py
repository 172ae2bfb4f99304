"""Section ``rewards``: a list of reward functions and models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from nightshift.config.base import Section

#: What a Python reward function may ask for, by parameter name.
REWARD_PARAMETERS = (
    "prompt",
    "response",
    "response_ids",
    "ground_truth",
    "data_source",
    "extra_info",
    "finish_reason",
)


class PythonReward(Section):
    """A Python function, called in worker processes of the reward deployment.

    The function takes keyword arguments by name, any of: prompt, response, response_ids, ground_truth, data_source,
    extra_info, finish_reason; or ``**kwargs``. It returns a float, an int, a bool, or a map with ``score``.
    """

    type: Literal["python"] = "python"
    """A Python function; the default kind."""
    function: str
    """``path.py:function``; the path is relative to the job file."""

    name: str | None = None
    """Name in the metrics; the function's name where absent."""

    weight: float = 1.0
    """Factor in the sum of all rewards of the job."""

    data_sources: list[str] | None = None
    """Only prompts of these data sources are scored by it; null: all."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for one sample; after it the sample is unscored and the worker is replaced."""

    workers: int = Field(default=1, ge=1)
    """Worker processes."""


class RemoteReward(Section):
    """A scorer behind a URL that speaks ``proto/nightshift/wire/v1/scorer.proto``."""

    type: Literal["grpc"] = "grpc"
    """A scorer of its own, in any language."""
    url: str = Field(pattern=r"^grpc://[^/\s]+:\d+$")
    """``grpc://host:port``."""
    name: str
    """Name in the metrics."""
    weight: float = 1.0
    """Factor in the sum of all rewards of the job."""
    data_sources: list[str] | None = None
    """Only prompts of these data sources are scored by it; null: all."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one call."""


def _kind(value: Any) -> str | None:
    """The discriminator: ``type``, which is "python" where it is left out."""
    kind = value.get("type", "python") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


RewardConfig = Annotated[
    Annotated[PythonReward, Tag("python")] | Annotated[RemoteReward, Tag("grpc")],
    Discriminator(
        _kind,
        custom_error_type="reward_type",
        custom_error_message="must be a map with type python or grpc",
    ),
]
