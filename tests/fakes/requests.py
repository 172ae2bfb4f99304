"""Requests to the fake engine, as it writes them down."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightshift.wire import codec
from services.rollout.request_log import RequestLogger, ResponseLog

GENERATE = "/inference/v1/generate"
ROUTE = "/nightshift/v1/generate"
INFO = "/nightshift/v1/info"
PREFETCH = "/nightshift/v1/prefetch"
BASE_VERSION = "default"
#: What each version of vLLM offers; see scripts/vllm_routes.py.
VLLM: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("vllm_routes.json").read_text())


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Request:
    """One request that was received."""

    order: int
    time: float
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    version: str  # weights on the server when it came
    paused: bool  # whether the server was paused when it came
    updates: int = 0  # weight updates that had begun when it came: it shares no cached prefix with requests of others
    status: int = 0
    answered: bool = False
    disconnected: bool = False
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # version of each token
    sent: int = 0  # tokens that have left in frames
    fault: str = ""
    log: ResponseLog = field(default_factory=lambda: RequestLogger(None).response("", ()))
    outbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    @property
    def request_id(self) -> str:
        """The client's own id."""
        return self.headers.get("x-request-id", "") or str(self.body.get("request_id", ""))

    @property
    def framed(self) -> bool:
        """Whether it came by our own route."""
        return self.path == ROUTE

    @property
    def is_sample(self) -> bool:
        """Whether a sample is drawn, and not a sequence scored."""
        return self.framed or (
            self.path == GENERATE and bool(self.body) and "prompt_logprobs" not in self.body.get("sampling_params", {})
        )

    @property
    def prompt_ids(self) -> list[int]:
        """Prompt token ids."""
        return [int(token) for token in self.body.get("token_ids", [])]

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters."""
        return dict(self.body if self.framed else self.body.get("sampling_params", {}))

    @property
    def flush_tokens(self) -> int:
        """Tokens after which a frame is wanted; 0: none before the end."""
        return int(self.body.get("flush_tokens", 0)) if self.framed else 0


def body_of(path: str, data: bytes) -> dict[str, Any]:
    """The body of a request, as its route encodes it."""
    if not data:
        return {}
    return dict(codec.unpack(data) if path == ROUTE else json.loads(data))
