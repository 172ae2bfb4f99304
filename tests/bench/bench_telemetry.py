"""What traces and metrics cost the runner in a step, as JSON: CPU seconds, and their share of the step time.

Run from the repository's folder: ``python -m tests.bench.bench_telemetry [--groups G] [--samples N]``.

The spans of a step are made as the runner makes them, with attributes and links, and go the runner's way: metrics,
sampler, ``events.jsonl``; vLLM's and the scorers' spans come as OTLP messages and are decoded. CPU time, so that other
work on the machine does not count. The share is that of one core; the default step is the demo's (docs/figures.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from nightshift.config import JobSpec
from nightshift.wire.events import EventLog
from nightshift.wire.trace import TraceContext, new_span_id
from orchestrator.api.metrics import RunMetrics
from orchestrator.api.otlp import decode
from orchestrator.runner.exporter import Exporter
from orchestrator.runner.tracing import Tracing, run_tracer


def spec_of(folder: Path) -> JobSpec:
    """A job for the exporter; nothing of it is read but its tracking."""
    return JobSpec.model_validate(
        {
            "name": "bench",
            "model": {"path": str(folder)},
            "data": {"train_files": ["x"], "max_prompt_length": 8},
            "rewards": [{"function": "x.py:f"}],
            "rollout": {"batch_size": 1, "n": 2, "max_response_length": 8},
        }
    )


def remote_spans(group_traces: list[tuple[str, str]], samples: int) -> bytes:
    """What vLLM and the scorers send for a step: a request per sample, two calls per group."""
    request = trace_service_pb2.ExportTraceServiceRequest()
    for service, count in (("nightshift.rollout", samples), ("nightshift.reward", 1), ("nightshift.reference", 1)):
        resource = request.resource_spans.add()
        attribute = resource.resource.attributes.add()
        attribute.key, attribute.value.string_value = "service.name", service
        scope = resource.scope_spans.add()
        for trace_id, parent in group_traces:
            for _ in range(count):
                span = scope.spans.add(name="llm_request", start_time_unix_nano=1, end_time_unix_nano=2)
                span.trace_id, span.parent_span_id = bytes.fromhex(trace_id), bytes.fromhex(parent)
                span.span_id = bytes.fromhex(new_span_id())
                for key in (
                    "gen_ai.request.id",
                    "gen_ai.usage.completion_tokens",
                    "gen_ai.latency.e2e",
                    "gen_ai.model",
                ):
                    more = span.attributes.add()
                    more.key, more.value.string_value = key, "12345678"
    return request.SerializeToString()


def step(tracing: Tracing, groups: int, samples: int) -> list[tuple[str, str]]:
    """Makes the runner's spans of one step."""
    roots = []
    for index in range(groups):
        root = tracing.group(group_id=f"g{index:07d}", row_id="row", epoch=0)
        roots.append(root)
        tracing.child("issue", root).end()
        rollout = tracing.child("rollout", root, role="rollout", group_id=f"g{index:07d}")
        with tracing.within(rollout):
            for slot in range(samples):
                span = tracing.child("generate", rollout, role="rollout", sample_id=f"g{index:07d}.{slot}")
                with tracing.within(span):
                    span.set_attributes(
                        {
                            "gen_ai.operation.name": "text_completion",
                            "gen_ai.usage.input_tokens": 50,
                            "gen_ai.usage.output_tokens": 100,
                            "gen_ai.response.finish_reasons": ["stop"],
                            "rl.policy_versions": ["run/0/1"],
                        }
                    )
        for name in ("reward", "reference", "keep", "buffer"):
            with tracing.within(tracing.child(name, root, role=name)):
                pass
    for name in ("optimizer_step", "store_rollouts", "await_push", "publish", "push_weights"):
        with tracing.within(tracing.job_span(name, links=roots if name != "push_weights" else (), step=1)):
            pass
    for root in roots:
        root.set_attributes({"rl.step": 1, "rl.policy_version": "run/0/1"})
        root.end()
    ids = [root.get_span_context() for root in roots]
    return [(f"{one.trace_id:032x}", f"{one.span_id:016x}") for one in ids]


def main() -> None:
    """Prints one JSON map."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--step-seconds", type=float, default=4.6)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = EventLog(folder / "events.jsonl", "run")
        exporter = Exporter(spec_of(folder), folder, events)
        exporter.metrics = RunMetrics("run")
        tracing = Tracing(run_tracer("run", exporter.on_span, None), TraceContext.new())
        cpu = []
        for _ in range(arguments.steps):
            began = time.process_time()
            traces = step(tracing, arguments.groups, arguments.samples)
            spent = time.process_time() - began
            data = remote_spans(traces, arguments.samples)  # their senders' time, not the runner's
            began = time.process_time()
            for span in decode(trace_service_pb2.ExportTraceServiceRequest.FromString(data)):
                exporter.on_span(span)
            exporter.metrics.on_event(
                {"kind": "step", "metrics": {"timing/step": 1.0, "reward/mean": 0.5, "samples": 32}}
            )
            events.flush()
            cpu.append(spent + time.process_time() - began)
        scrapes = []
        for _ in range(20):
            began = time.process_time()
            exporter.metrics.exposition()
            scrapes.append(time.process_time() - began)
        events.close()
        size = (folder / "events.jsonl").stat().st_size / arguments.steps
    per_step = statistics.median(cpu)
    spans = arguments.groups * (2 * arguments.samples + 9) + 5
    print(
        json.dumps(
            {
                "groups": arguments.groups,
                "samples": arguments.groups * arguments.samples,
                "spans": spans,
                "cpu_ms_per_step": round(1000 * per_step, 3),
                "cpu_us_per_span": round(1e6 * per_step / spans, 1),
                "step_seconds": arguments.step_seconds,
                "share_of_step": round(per_step / arguments.step_seconds, 6),
                "shortest_step_for_2_percent_s": round(per_step / 0.02, 3),
                "kib_of_events_per_step": round(size / 1024, 1),
                "cpu_ms_per_scrape": round(1000 * statistics.median(scrapes), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
