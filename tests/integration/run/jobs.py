"""Small jobs on the tiny model, run by the command line as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nightshift.wire.events import read_events

ROOT = Path(__file__).resolve().parents[3]
LETTERS = "bdfhkmprtwy"


def write_job(folder: Path, model: Path, /, **overrides: Any) -> Path:
    """Writes a job file of three deterministic steps, its data and its reward; sections are merged."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text((Path(__file__).parent / "reward.py").read_text())
    rows = [
        {"prompt": [{"role": "user", "content": f"{at} {LETTERS[at % 11]}"}], "ground_truth": LETTERS[at % 11]}
        for at in range(24)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(model)},
        "data": {"train_files": ["train.jsonl"], "max_prompt_length": 48},
        "rewards": [{"function": "reward.py:score", "timeout_s": 30}],
        "algorithm": {"estimator": "grpo", "kl_coef": 0.05},
        "pipeline": {"max_staleness": 0, "deterministic": True, "role_timeout_s": 300},
        "rollout": {
            "batch_size": 2,
            "n": 4,
            "max_response_length": 12,
            "temperature": 0.8,
            "kv_cache_gib": 0.05,
            "max_num_seqs": 16,
        },
        "trainer": {"total_steps": 3, "learning_rate": 1e-3, "micro_batch_size": 4, "test_freq": 0},
        "checkpoint": {"keep": None},
        "tracking": {"tensorboard": False},
        "resources": {"runs_dir": str(folder / "runs"), "device": "cpu"},
    }
    for section, values in overrides.items():
        job[section] = {**job.get(section, {}), **values} if isinstance(values, dict) else values
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@dataclass
class Finished:
    """A run that has ended."""

    code: int
    folder: Path
    output: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """All its events."""
        return list(read_events(self.folder / "events.jsonl"))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [event for event in self.events if event["kind"] == kind]

    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each step."""
        return [event["metrics"] for event in self.of_kind("step")]

    def weights(self, step: int) -> Path:
        """The exported weights of a step."""
        return self.folder / "checkpoints" / "actor" / f"global_step_{step}" / "model.safetensors"


class Running:
    """A run in progress, in a process of its own."""

    def __init__(self, job: Path, *arguments: str) -> None:
        self.folder = job.parent / "runs" / f"run-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "nightshift.cli.main", "run", str(job), *arguments]
        if "--resume" not in arguments:
            command += ["--run-dir", str(self.folder)]
        else:
            self.folder = Path(arguments[arguments.index("--resume") + 1])
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, cwd=job.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def events(self) -> list[dict[str, Any]]:
        """Its events so far."""
        path = self.folder / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def wait_for(self, kind: str, timeout_s: float = 240, **fields: Any) -> dict[str, Any]:
        """Waits for an event with these fields; the run must not end before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self.events():
                if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items()):
                    return event
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        output, _ = self.process.communicate(timeout=120) if self.process.poll() is not None else ("still running", "")
        raise AssertionError(f"no {kind} event with {fields} within {timeout_s} s: {output[-3000:]}")

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def finish(self, timeout_s: float = 400) -> Finished:
        """Waits for the end."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
            output, _ = self.process.communicate(timeout=60)
            raise AssertionError(f"the run did not end within {timeout_s} s: {output[-3000:]}") from None
        return Finished(self.process.returncode, self.folder, output)


def run(job: Path, *arguments: str, timeout_s: float = 400) -> Finished:
    """Runs a job to its end."""
    return Running(job, *arguments).finish(timeout_s)


def leftovers(run_id: str) -> list[str]:
    """What a run has left behind: processes that carry its id, and files in shared memory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"NIGHTSHIFT_RUN_ID={run_id}".encode() in path.read_bytes():
                found.append(f"process {path.parent.name}")
        except OSError:
            continue
    return found + [str(path) for path in Path("/dev/shm").glob(f"*{run_id}*")]
