"""What the fake engine says of itself, in the forms of vLLM and of our own route."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.fakes.faults import Fault
from tests.fakes.requests import VLLM


def info(vllm: str, version: str, offered: list[str], missing: frozenset[str], prefetch: bool) -> dict[str, Any]:
    """The answer of our info route."""
    return {
        "vllm_version": vllm,
        "weight_version": version,
        "routes": offered,
        "capabilities": {
            "generate": True,
            "weight_version": "weight_version" not in missing,
            "weight_versions_spans": VLLM[vllm]["spans"],
            "pause": "/pause" in offered,
            "update_phases": "/update_weights" in offered and "weight_transfer" not in missing,
            "abort": "/abort_requests" in offered,
            "sleep": "/sleep" in offered and "sleep_mode" not in missing,
            "prefetch": prefetch,
            "keep_cache": "keep_cache" not in missing,
        },
    }


def metrics(*, running: int, waiting: int, slots: int, drawn: int) -> str:
    """The page of ``/metrics``, as far as it is read."""
    values = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": waiting,
        "vllm:kv_cache_usage_perc": min(1.0, running / slots),
        "vllm:num_preemptions_total": 0,
        "vllm:generation_tokens_total": drawn,
    }
    return "".join(f'{name}{{engine="0",model_name="policy"}} {float(value)}\n' for name, value in values.items())


def prompt_logprobs(ids: list[int], scores: list[float]) -> list[dict[str, Any] | None]:
    """Log-probs of a prompt's tokens but the first, as vLLM lists them."""
    return [
        None,
        *({str(token): {"logprob": float(s), "rank": 1}} for token, s in zip(ids[1:], scores, strict=True)),
    ]


def tokens_before(fault: Fault | None, kind: str) -> int:
    """Number of tokens after which a fault of this kind happens; -1: never."""
    name, _, tokens = fault.kind.partition("@") if fault else ("", "", "")
    return int(tokens or 0) if name == kind else -1


def seed_of(seed: Any, request_id: str) -> int:
    """The seed of a request: its own, or one made of its id."""
    if seed is not None:
        return int(seed)
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")


def step_of(version: str) -> int:
    """The step in a policy version."""
    return int(version.rpartition("/")[2])


async def disconnected(receive: Any) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
