"""Weight updates under running requests against drained servers, in a simulated fleet that generation keeps busy.

``python -m tests.bench.bench_in_flight [--out FILE]``, from the repository's folder; virtual clock, one run an arm.
Speeds are those measured on one H200 (docs/figures.md): decoding at 64 streams, 0.14 s from pause to resume. Running
requests go on with the cache that they have, or their contexts are read again after a push, at a rate that was not
measured and can be varied. Each arm
gives sampled tokens a second between updates, and the pause of an engine (last token before to first token after);
beside them is what the model of the step time says. A long interval between pushes is what favours draining.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from nightshift.analysis.speedup import StageTimes, recompute_seconds, step_seconds
from tests.bench.bench_fleet import PROMPT_TOKENS, TICK_S, environment
from tests.sim.clock import run_virtual
from tests.sim.lengths import Lengths
from tests.sim.model import Speed
from tests.sim.run import Scale, SimRun

ENGINES, N, ETA, WARM = 2, 2, 4, 5


#: What becomes of running responses at a push: their cache is kept, it is computed anew, or they end first.
ARMS: dict[str, dict[str, Any]] = {
    "keep": {"weight_update": "in_flight", "keep_cache": True},
    "recompute": {"weight_update": "in_flight", "keep_cache": False},
    "drain": {"weight_update": "drain"},
}


async def _run(scale: Scale, batch: int, steps: int, mode: str) -> dict[str, Any]:
    job = {
        "rollout": {"batch_size": batch, "n": N, "flush_tokens": 1024, "refill": "fixed"},
        "trainer": {"total_steps": steps, "learning_rate": 1e-6},
        # As many requests as there are slots: a drain also waits for what is queued.
        "pipeline": {
            "max_staleness": ETA,
            "streaming": False,
            **ARMS[mode],
            "max_groups_in_flight": scale.engines * scale.speed.slots // N,
        },
        "tracking": {"tensorboard": False, "rollouts": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = SimRun(Path(folder), scale, **job)
        with run.in_process():
            async with run:
                if code := await run.run(limit_s=1e7):
                    raise RuntimeError(f"the run failed with {code}: {run.error()}")
        trainer, engines = run.sim_trainer, [sim.model for sim in run.sims]
        applied, tokens = trainer.applied, trainer.tokens
        seconds = applied[-1] - applied[WARM]
        gaps = [gap for sim in run.sims for gap in sim.gaps]
        return {
            "tokens_per_s": round(sum(tokens[WARM + 1 :]) / seconds),
            "step_s": round(seconds / (len(applied) - 1 - WARM), 3),
            "pause_s": round(statistics.median(gaps), 3) if gaps else None,
            "recomputed_share": round(sum(e.recomputed for e in engines) / sum(e.tokens for e in engines), 4),
            "twice": trainer.twice,
            "tokens_beyond_bound": sum(count for age, count in trainer.ages.items() if not 0 <= age <= ETA),
        }


def predicted(scale: Scale, batch: int, *, again: bool) -> float:
    """Seconds of a step of the model, with updates under running requests and all slots full.

    Args:
        again: whether their contexts are read again after each push.
    """
    speed, mean = scale.speed, scale.lengths.mean
    rate = scale.engines * speed.slots / speed.step_s(speed.slots)
    # A response is met by a push at any of its tokens, and long ones are met more often: half of E[L^2] / E[L].
    context = PROMPT_TOKENS + _mean_square(scale.lengths) / (2 * mean)
    reading = N * batch * PROMPT_TOKENS / speed.prefill_tokens_s / scale.engines
    return step_seconds(
        StageTimes(
            generation=N * batch * mean / rate + reading,
            scoring=0,
            training=N * batch * (mean + PROMPT_TOKENS) * scale.train_token_s,
            publication=scale.publish_s,
            pause=scale.load_s,
            recompute=recompute_seconds(speed.slots, context, speed.prefill_tokens_s) if again else 0.0,
        ),
        None,
    )


def _mean_square(lengths: Lengths) -> float:
    return statistics.fmean(lengths.at((at + 0.5) / 4000) ** 2 for at in range(4000))


def main() -> None:
    """Prints one JSON map."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prefill", type=float, nargs="+", default=[125_000.0])
    parser.add_argument("--steps", type=int, default=17)
    options = parser.parse_args()
    rows = []
    for batch in options.batches:
        for prefill in options.prefill:
            speed = replace(Speed(), prefill_tokens_s=prefill)
            scale = Scale(engines=ENGINES, speed=speed, train_token_s=1e-6)
            arms = {}
            for mode in ARMS:
                arms[mode] = run_virtual(_run(scale, batch, options.steps, mode), TICK_S)
            row = {
                "groups_a_step": batch,
                "samples_a_group": N,
                "prefill_tokens_s": prefill,
                "beside_drain": {
                    mode: round(found["tokens_per_s"] / arms["drain"]["tokens_per_s"], 3)
                    for mode, found in arms.items()
                },
                "predicted_step_s": {
                    mode: round(predicted(scale, batch, again=mode == "recompute"), 3) for mode in ("keep", "recompute")
                },
                **arms,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
