"""Speed of whole jobs through ``nightshift run`` on one GPU.

python -m tests.gpu.measure MODEL WORK [--staleness 1 0] [--sleep] [--rounds 1] [--steps 8] [--warm 3]

Each staleness bound is a run of its own, in alternation where there are several rounds; steps after the warm-up count.
``--sleep`` adds one with bound 0 whose server sleeps while the trainer works. Prints one JSON line a run, and after
several rounds the ratios of the first kind of run to each other one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from nightshift.cli.estimate import read_shape
from tests.gpu.jobs import PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS, SAMPLES, run_steps, write_job
from tests.gpu.trainer import PEAK, flops_per_token

_SHOWN = (
    "timing/gen",
    "timing/wait",
    "timing/reward",
    "timing/adv",
    "timing/update_actor",
    "timing/publish",
    "timing/sync",
    "timing/push",
    "timing/sleep",
    "timing/wake",
    "staleness/mean",
    "log_ratio/abs_mean",
    "clip_fraction",
    "sync/changed_fraction",
    "bubble/trainer",
    "bubble/rollout",
    "memory/gpu_peak_bytes",
)


def summary(events: list[dict[str, Any]], warm: int, model: Path) -> dict[str, Any]:
    """Figures of the steps after the warm-up. Rates are over the wall time from the first to the last of them."""
    from transformers import AutoConfig

    steps = [event for event in events if event["kind"] == "step"]
    ready = next(
        event for event in events if event["kind"] == "role" and event["role"] == "agent" and event["state"] == "ready"
    )
    counted = steps[warm:]
    span = counted[-1]["time"] - steps[warm - 1]["time"]
    samples = sum(step["metrics"]["samples"] for step in counted)
    median = {name: statistics.median(step["metrics"].get(name, 0.0) for step in counted) for name in _SHOWN}
    config = AutoConfig.from_pretrained(model)
    parameters = read_shape(model).parameters
    tokens = PROMPTS * SAMPLES * (PROMPT_TOKENS + RESPONSE_TOKENS)
    flops = flops_per_token(config, parameters, PROMPT_TOKENS + RESPONSE_TOKENS) * tokens
    gigabytes = counted[-1]["metrics"]["sync/bytes"] / 1e9
    return {
        "steps": len(counted),
        "seconds_per_step": round(span / len(counted), 3),
        "samples_per_second": round(samples / span, 2),
        "new_tokens_per_second": round(samples * RESPONSE_TOKENS / span),
        "step_seconds": [round(step["metrics"]["timing/step"], 2) for step in steps],
        "mfu_while_training": round(flops / median["timing/update_actor"] / PEAK, 4),
        "sync_s_per_gb": round(median["timing/sync"] / gigabytes, 4),
        "until_first_step_s": round(steps[0]["time"] - ready["time"], 1),
        "median": {name: round(value, 4) for name, value in median.items()},
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 0])
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no further run begins")
    arguments = parser.parse_args()
    began = time.monotonic()
    kinds = [{"eta": bound, "sleep": False} for bound in arguments.staleness]
    kinds += [{"eta": 0, "sleep": True}] if arguments.sleep else []
    rates: list[list[float]] = [[] for _ in kinds]
    for at in [*range(len(kinds))] * arguments.rounds:
        kind, name = kinds[at], f"eta{kinds[at]['eta']}{'-sleep' if kinds[at]['sleep'] else ''}"
        if time.monotonic() - began > arguments.until:
            break
        job = write_job(
            arguments.work / name,
            arguments.model,
            arguments.warm + arguments.steps + 50,
            pipeline={"max_staleness": kind["eta"]},
            rollout={"sleep_mode": kind["sleep"]},
        )
        try:
            _, events, output = run_steps(job, arguments.warm + arguments.steps, arguments.timeout)
        except RuntimeError as error:
            print(json.dumps({**kind, "error": str(error)[-2000:]}), flush=True)
            continue
        found = summary(events, arguments.warm, arguments.model)
        warnings = [event["message"][:200] for event in events if event["kind"] == "warning"]
        rates[at].append(found["samples_per_second"])
        print(json.dumps({**kind, **found, "warnings": warnings}), flush=True)
        (arguments.work / f"{name}.out").write_text(output)
    for kind, others in zip(kinds[1:], rates[1:], strict=True):
        pairs = [round(one / other, 3) for one, other in zip(rates[0], others, strict=False)]
        if pairs:
            ratio = round(statistics.median(pairs), 3)
            print(json.dumps({"of": kinds[0], "to": kind, "ratios": pairs, "median": ratio}), flush=True)


if __name__ == "__main__":
    main()
