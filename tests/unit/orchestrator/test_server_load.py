"""The few metrics of a server that are read."""

from __future__ import annotations

import pytest

from orchestrator.runner.load import Load, parse_load

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a{b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="a{b} c"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.5e+03
vllm:time_to_first_token_seconds_bucket{le="0.001"} 0.0
"""


def test_engines_of_one_server_are_taken_together() -> None:
    assert parse_load(PAGE) == Load(running=7.0, waiting=2.0, kv_usage=0.5, preemptions=1.0, tokens=1500.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        PAGE.replace("vllm:kv_cache_usage_perc", "vllm:other"),
        PAGE.replace('policy"} 2.0', 'policy"} NaN'),
        PAGE.replace('policy"} 2.0', 'policy"} many'),
        PAGE.replace('policy"} 2.0', 'policy"} -1'),
        PAGE.replace('running{engine="0"', 'running{engine="0'),
    ],
)
def test_a_page_that_is_no_reading_is_none(text: str) -> None:
    assert parse_load(text) is None
