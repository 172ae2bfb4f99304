"""A job of the demo with other values, run by ``nightshift run`` until so many steps are made; and what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from nightshift.analysis.recording import load
from nightshift.analysis.report import report

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "examples/first_run/job.yaml"
MIDDLEWARE = "rollout.extra_args=[--middleware,tests.bench.real.middleware.ForcedLengths]"
#: A reward whose value is spread, so that forced random answers have something to learn from.
SPREAD_REWARD = f"rewards=[{{function: '{ROOT / 'tests/gpu/reward.py'}:score', timeout_s: 10}}]"
#: What every measured arm has: no reference, no evaluation, and no checkpoint between the steps.
MEASURED = (
    "algorithm.kl_coef=0",
    "trainer.test_freq=0",
    "data.test_files=[]",
    "checkpoint.export=false",
    "tracking.tensorboard=false",
)


def make_data() -> None:
    """Makes the demo's prompts where they are not there yet."""
    if not (DEMO.parent / "data/lastword/train.parquet").exists():
        subprocess.run([sys.executable, str(DEMO.parent / "make_data.py")], check=True, capture_output=True)


def run(
    folder: Path,
    overrides: Sequence[str],
    *,
    steps: int | None,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    job: Path = DEMO,
) -> Path:
    """Runs a job to its end, or until so many steps are logged: then it is ended without a checkpoint.

    Args:
        steps: None: to its end.

    Returns:
        The run's folder.

    Raises:
        RuntimeError: it ended before, or took too long; quotes the end of its output.
    """
    make_data()
    run_dir = folder / f"run-{time.monotonic_ns()}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "nightshift.cli.main", "run", str(job), *overrides, "--run-dir", str(run_dir)]
    values = os.environ | {"HF_HUB_OFFLINE": "1", **(environment or {})}
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    output = folder / f"{run_dir.name}.out"
    deadline = time.monotonic() + timeout_s
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=values, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if steps is not None and _made(run_dir) >= steps:
                    break
                time.sleep(1.0)
        finally:
            _end(process)
    made = _made(run_dir)
    if made < (steps or 1) or (steps is None and process.returncode):
        text = output.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{made} of {steps} steps within {timeout_s:g} s, exit {process.returncode}: {text}")
    return run_dir


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    process.wait(90)


def _made(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def figures(run_dir: Path, warm: int) -> dict[str, Any]:
    """What a run measured over its steps after the warm-up: wall time from the end of one step to that of another.

    Raises:
        RuntimeError: there are no such steps.
    """
    recording = load(run_dir)
    steps, counted = recording.steps, recording.steps[warm:]
    if not counted or not warm:
        raise RuntimeError(f"{run_dir} has {len(steps)} steps, and {warm} of them are left out")
    span = counted[-1].time - steps[warm - 1].time
    samples = sum(step.metrics["samples"] or 0.0 for step in counted)
    tokens = sum((step.metrics["samples"] or 0.0) * (step.metrics["response_length/mean"] or 0.0) for step in counted)
    found = report(recording)
    began = min((span.start for span in recording.named("generate")), default=steps[0].time)
    return {
        "steps": len(counted),
        "seconds_per_step": span / len(counted),
        "samples_per_second": samples / span,
        "tokens_per_second": tokens / span,
        "tokens_per_sample": tokens / samples,
        "rewards": [step.metrics.get("reward/mean") for step in steps],
        "seconds": [round(step.time - began, 2) for step in steps],
        "response_length": [step.metrics.get("response_length/mean") for step in steps],
        "mean_stage": {
            key: fmean(value for step in counted if (value := step.metrics.get(metric)) is not None)
            for key, metric in {
                "generation": "timing/gen",
                "update": "timing/update_actor",
                "publication": "timing/publish",
                "delivery": "timing/push",
                "pause": "timing/sync",
                "wait": "timing/wait",
                "step": "timing/step",
            }.items()
        },
        "log_ratio": fmean(step.metrics.get("log_ratio/abs_mean") or 0.0 for step in counted),
        "report": json.loads(json.dumps(asdict(found))),
    }


@contextlib.contextmanager
def judge(seconds: float) -> Iterator[str]:
    """A remote judge that takes so many seconds; gives its address."""
    command = [sys.executable, "-m", "tests.bench.real.judge", "--seconds", str(seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError("the judge did not start")
            yield address
        finally:
            process.terminate()
