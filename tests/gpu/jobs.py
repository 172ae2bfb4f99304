"""Job files for one GPU, and a run of one that is ended after so many steps."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nightshift.data import Tokenizer
from nightshift.wire.events import read_events

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 128, 512
#: 32 samples of 640 tokens.
MICRO_BATCH_TOKENS = 20480


def write_data(path: Path, model: Path, rows: int, tokens: int = PROMPT_TOKENS) -> None:
    """Prompts of exactly so many tokens: words that are one token each."""
    tokenizer = Tokenizer.load(model)
    raw = json.loads((model / "tokenizer.json").read_text())
    words = sorted(i for t, i in raw["model"]["vocab"].items() if i < 49000 and re.fullmatch("\u0120[a-z]{2,9}", t))
    rng = random.Random(0)
    with path.open("w") as file:
        written = 0
        while written < rows:
            text = tokenizer.decode([rng.choice(words) for _ in range(tokens)], skip_special_tokens=False)
            if len(tokenizer.encode(text, add_special_tokens=False)) == tokens:
                file.write(json.dumps({"prompt": text, "ground_truth": ""}) + "\n")
                written += 1


def write_job(folder: Path, model: Path, /, steps: int, **overrides: Any) -> Path:
    """Writes the measured job: 32 x 8 samples of 128 + 512 tokens, one update a step; sections are merged."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text((Path(__file__).parent / "reward.py").read_text())
    job: dict[str, Any] = {
        "name": "gpu",
        "model": {"path": str(model)},
        "data": {"train_files": ["train.jsonl"], "max_prompt_length": PROMPT_TOKENS, "apply_chat_template": False},
        "rewards": [{"function": "reward.py:score", "timeout_s": 10}],
        "algorithm": {"estimator": "grpo", "kl_coef": 0.0},
        "pipeline": {"max_staleness": 1, "role_timeout_s": 120},
        "rollout": {
            "batch_size": PROMPTS,
            "n": SAMPLES,
            "max_response_length": RESPONSE_TOKENS,
            "min_response_length": RESPONSE_TOKENS,
            "ignore_eos": True,
            "dtype": "bfloat16",
            "kv_cache_gib": 10.0,
            "max_num_seqs": PROMPTS * SAMPLES,
        },
        "trainer": {
            "total_steps": steps,
            "learning_rate": 1e-6,
            "dtype": "bfloat16",
            "max_tokens_per_micro_batch": MICRO_BATCH_TOKENS,
            "test_freq": 0,
            "threads": 4,
        },
        "checkpoint": {"keep": 1, "export": False},
        "resources": {"runs_dir": str(folder / "runs"), "ray_object_store_mib": 512},
    }
    for section, values in overrides.items():
        job[section] = {**job.get(section, {}), **values} if isinstance(values, dict) else values
    if not (folder / "train.jsonl").exists():
        write_data(folder / "train.jsonl", model, job["rollout"]["batch_size"] * 8, job["data"]["max_prompt_length"])
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def run_whole(job: Path, folder: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """``nightshift run`` to the job's end, in a folder of its own or, with ``--resume``, in one that is there.

    Returns:
        What the command wrote.

    Raises:
        RuntimeError: it failed; quotes the end of its output.
    """
    where = ["--resume", str(folder)] if folder.exists() else ["--run-dir", str(folder)]
    command = [sys.executable, "-m", "nightshift.cli.main", "run", str(job), *where, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command,
        cwd=job.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-3000:]}")
    return done.stdout


def run_steps(
    job: Path,
    steps: int,
    timeout_s: float,
    watch: Callable[[Path, list[dict[str, Any]]], None] = lambda folder, events: None,
) -> tuple[Path, list[dict[str, Any]], str]:
    """``nightshift run`` until so many steps are logged; then it is ended without a checkpoint.

    Args:
        watch: given the run's folder and its events so far, twice a second.

    Returns:
        The run's folder, its events, and what the command wrote.

    Raises:
        RuntimeError: it ended before, or took too long; quotes the end of its output.
    """
    folder = job.parent / "runs" / f"run-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "nightshift.cli.main", "run", str(job), "--run-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    output = job.parent / f"{folder.name}.out"
    deadline = time.monotonic() + timeout_s
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=job.parent, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                events = list(read_events(folder / "events.jsonl")) if (folder / "events.jsonl").exists() else []
                if sum(event["kind"] == "step" for event in events) >= steps:
                    break
                watch(folder, events)
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
            process.wait(90)
    text = output.read_text(errors="replace")
    events = list(read_events(folder / "events.jsonl")) if (folder / "events.jsonl").exists() else []
    if sum(event["kind"] == "step" for event in events) < steps:
        raise RuntimeError(f"{sum(event['kind'] == 'step' for event in events)} of {steps} steps: {text[-3000:]}")
    return folder, events, text
