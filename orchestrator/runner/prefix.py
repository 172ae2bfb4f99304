"""A response drawn in parts: what one server drew before it broke off, and what is still to be asked for. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nightshift.wire.experience import FINISH_LENGTH, FINISH_STOP, VersionSpan
from orchestrator.runner.answers import Generated, GenerateRequest


def join(first: Generated | None, second: Generated) -> Generated:
    """The tokens of ``second`` behind those of ``first``, with its end."""
    if first is None:
        return second
    offset = len(first.response_ids)
    versions = list(first.versions)
    for span in second.versions:
        if versions and versions[-1].version == span.version:
            versions[-1] = VersionSpan(span.version, versions[-1].start, span.end + offset)
        else:
            versions.append(VersionSpan(span.version, span.start + offset, span.end + offset))
    return Generated(
        response_ids=np.concatenate([first.response_ids, second.response_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        versions=versions,
        finish_reason=second.finish_reason,
    )


def completed(request: GenerateRequest, prefix: Generated) -> Generated | None:
    """The response, where the prefix is all of it: only the notice of its end was lost.

    As in vLLM a stop id ends a response wherever it is sampled (``min_tokens`` keeps it from being sampled), and one
    that is also the last that fits is a stop.
    """
    tokens = len(prefix.response_ids)
    if not tokens:
        return None
    if int(prefix.response_ids[-1]) in request.stop_token_ids:
        return replace(prefix, finish_reason=FINISH_STOP)
    return replace(prefix, finish_reason=FINISH_LENGTH) if tokens >= request.max_tokens else None


def rest(request: GenerateRequest, prefix: Generated | None) -> GenerateRequest:
    """The request for what comes after the prefix."""
    if prefix is None:
        return request
    tokens = len(prefix.response_ids)
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, prefix.response_ids]).astype(np.int32, copy=False),
        max_tokens=request.max_tokens - tokens,
        min_tokens=max(0, request.min_tokens - tokens),
    )


def named(request: GenerateRequest, request_id: str, traceparent: str) -> GenerateRequest:
    """The request of one attempt."""
    # Written out: dataclasses.replace takes twice as long, for each response.
    return GenerateRequest(
        request_id,
        request.prompt_ids,
        request.max_tokens,
        request.temperature,
        request.stop_token_ids,
        request.seed,
        request.min_tokens,
        request.ignore_eos,
        traceparent,
    )
