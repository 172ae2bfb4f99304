"""What a server says of its load: the few of vLLM's Prometheus metrics that are used. Pure.

The names are those of vLLM 0.26 to 0.33. Several engines of one server have a series each: requests, tokens and
preemptions are added up, of the KV caches the fullest counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:generation_tokens_total": "tokens",
}


@dataclass(frozen=True, slots=True)
class Load:
    """One reading."""

    running: float  # requests that are being decoded
    waiting: float  # requests in the server's queue
    kv_usage: float  # share of the KV cache that is in use, 0..1
    preemptions: float  # since the server's start
    tokens: float  # drawn since the server's start


def parse_load(text: str) -> Load | None:
    """Reads the answer of ``/metrics``; None where it lacks one of the metrics, or they are no numbers."""
    # The whole page has hundreds of lines of histograms, which would cost milliseconds to parse.
    wanted = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _NAMES]
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join([*wanted, ""])):
            for sample in family.samples:
                name, value = _NAMES[sample.name], float(sample.value)
                before = found.get(name, 0.0)
                found[name] = max(before, value) if name == "kv_usage" else before + value
    except (KeyError, ValueError):
        return None
    if len(found) != len(_NAMES) or not all(math.isfinite(value) and value >= 0 for value in found.values()):
        return None
    return Load(**found)
