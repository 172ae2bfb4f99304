"""Choices of vLLM's JSON answers, whole or spoiled."""

from __future__ import annotations

from typing import Any

from tests.fakes.faults import Fault


def choice(ids: list[int], logprobs: list[float], versions: list[str], finish: str) -> dict[str, Any]:
    """One choice of an answer."""
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    content = [{"token_id": token, "logprob": value, "rank": 1} for token, value in zip(ids, logprobs, strict=True)]
    return {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }


def spoil(choice: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
    """A choice with a fault in it."""
    content, spans = choice["logprobs"]["content"], choice["weight_versions"]
    match fault.kind if fault else "":
        case "short_logprobs":
            content.pop()
        case "null_logprob":
            content[0]["logprob"] = None
        case "positive_logprob":
            content[0]["logprob"] = 0.3
        case "zero_logprobs":
            for entry in content:
                entry["logprob"] = 0.0
        case "no_versions":
            choice["weight_versions"] = []
        case "gap":
            spans[-1]["end"] += 1
        case "unknown_version":
            for span in spans:
                span["version"] = "default"
        case "null_version":
            for span in spans:
                span["version"] = None
        case "bad_finish":
            choice["finish_reason"] = "error"
        case "unfinished":
            choice["finish_reason"] = None
        case "strange_token":
            choice["token_ids"][0] = content[0]["token_id"] = 1 << 20
        case "other_tokens":
            content[0]["token_id"] += 1
    return choice
