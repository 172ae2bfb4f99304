"""``python -m services.trainer.replay RUN_DIR STEP``: makes a step of a run again from what the run stored.

Starts from the newest checkpoint before the step, or from the model's own weights, and goes through the recorded
schedule up to the step: same groups in the same order and parts, same loss, same learning rate. In float32 on a CPU the
weights are the run's to the bit. Prints one JSON object; the exit code is 0 where nothing differs, 1 where something
does, 2 where the run does not hold what is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nightshift.algorithms import compute_advantages
from nightshift.config import JobSpec
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.config.load import read_resolved
from nightshift.gpu import find_device
from nightshift.wire.errors import BadInputError, NightshiftError
from nightshift.wire.experience import Floats, LossSpec, Sample, VersionSpan, pack_loss, pack_samples
from nightshift.wire.schedule import StepRecord, read_schedule
from services.trainer.config import RankConfig
from services.trainer.coordinator import Coordinator, UpdateCall
from services.trainer.folders import MANIFEST, read_manifest
from services.trainer.local_ranks import LocalRanks
from services.trainer.updates import PartKey

_NEEDED = ("sample_id", "group_id", "prompt_ids", "response_ids", "logprobs", "loss_mask", "advantages", "reward")


@dataclass(slots=True)
class StepResult:
    """What came of one step.

    Attributes:
        recorded: digest of the weights that the run published after it; empty where it has none.
        replayed: digest of the weights that were made now.
        same: whether they are equal; None where the run has no digest.
        advantage_difference: largest difference between the stored advantages and those that follow from the stored
            rewards; None where they were not computed.
        note: why they were not.
    """

    step: int
    recorded: str
    replayed: str
    same: bool | None
    advantage_difference: float | None = None
    note: str = ""


@dataclass(slots=True)
class Replayed:
    """The whole result.

    Attributes:
        begun_at: step of the checkpoint that it started from; 0: the model's own weights.
        steps: every step that was made again.
        weight_difference: largest absolute difference from the weights of the checkpoint of the last step; None where
            the run has no such checkpoint.
    """

    begun_at: int
    steps: list[StepResult]
    weight_difference: float | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.weight_difference and all(
            step.same is not False and not step.advantage_difference for step in self.steps
        )


def replay(run_dir: Path, step: int) -> Replayed:
    """Makes the steps up to ``step`` again.

    Raises:
        BadInputError: the run has no such step, or did not store what it was made of.
    """
    schedule = read_schedule(run_dir)
    if step not in schedule:
        made = f"1 to {max(schedule)}" if schedule else "none"
        raise BadInputError(f"the run has no step {step} in its schedule: {made}", role="job", fix="Choose one of them")
    begun_at = _checkpoint_before(run_dir, schedule, step)
    missing = [number for number in range(begun_at + 1, step + 1) if number not in schedule]
    if missing:
        raise BadInputError(f"the schedule lacks step {missing[0]}", role="job", fix="Choose a later step")
    spec = read_resolved(run_dir / "job.yaml")
    return asyncio.run(_replay(run_dir, spec, schedule, begun_at, step))


async def _replay(run_dir: Path, spec: JobSpec, schedule: dict[int, StepRecord], begun_at: int, step: int) -> Replayed:
    config = replace(RankConfig.from_spec(spec, find_device(spec.resources.device)), weight_backend="safetensors")
    result = Replayed(begun_at, [])
    with (
        tempfile.TemporaryDirectory(prefix="nightshift-replay-") as scratch,
        LocalRanks(config, spec.trainer.ranks, spec.trainer.update_timeout_s) as ranks,
    ):
        coordinator = Coordinator(ranks, await ranks.start(), Path(scratch) / "store")
        state = str(_state_dir(run_dir, begun_at)) if begun_at else ""
        await coordinator.load(state, _name(begun_at))
        for number in range(begun_at + 1, step + 1):
            record = schedule[number]
            samples = read_samples(run_dir, record)
            await _make_step(coordinator, record, samples)
            digest = (await coordinator.publish(_name(number), [])).digest
            found = StepResult(number, record.digest, digest, digest == record.digest if record.digest else None)
            found.advantage_difference, found.note = _advantage_difference(record, samples)
            result.steps.append(found)
        if _is_checkpoint(run_dir, schedule, step):
            result.weight_difference = await _weight_difference(ranks, _state_dir(run_dir, step), Path(scratch))
    return result


async def _make_step(coordinator: Coordinator, record: StepRecord, samples: dict[str, list[Sample]]) -> None:
    loss, left_out = LossSpec(**record.loss), set(record.left_out)
    for number, groups in enumerate(record.parts):
        final = number == len(record.parts) - 1
        chosen = [sample for group in groups for sample in samples[group] if sample.sample_id not in left_out]
        await coordinator.update(
            UpdateCall(
                key=PartKey(record.step, 0, number),
                expect_version=_name(record.step - 1),
                new_version=_name(record.step),
                final=final,
                samples=pack_samples(chosen),
                loss=pack_loss(loss if final else replace(loss, total_tokens=0, total_sequences=0)),
                learning_rate=record.learning_rate,
            )
        )


def read_samples(run_dir: Path, record: StepRecord) -> dict[str, list[Sample]]:
    """The stored samples of a step by group, in the order in which they were trained.

    Raises:
        BadInputError: they were not stored, or not all of them, or without a column that the update needs.
    """
    path = run_dir / "rollouts" / f"step_{record.step:06d}.parquet"
    try:
        rows = pq.read_table(path).to_pylist()
    except FileNotFoundError:
        raise BadInputError(
            f"{path} is not there", role="job", fix="Only runs with tracking.rollouts can be replayed"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"cannot read {path}: {str(error).splitlines()[0]}", role="job") from error
    lacking = [name for name in _NEEDED if rows and name not in rows[0]]
    if lacking:
        raise BadInputError(f"{path} has no column {lacking[0]!r}", role="job", fix="It was stored by an older version")
    samples: dict[str, list[Sample]] = {}
    for row in rows:
        samples.setdefault(row["group_id"], []).append(_sample(row))
    for group in (group for part in record.parts for group in part):
        if group not in samples:
            raise BadInputError(f"{path} has no group {group}, which step {record.step} trained", role="job")
    return samples


def _sample(row: dict[str, Any]) -> Sample:
    tokens = len(row["response_ids"])
    starts = row.get("version_starts") or []
    ends = [*starts[1:], tokens]
    return Sample(
        sample_id=row["sample_id"],
        group_id=row["group_id"],
        trace_id=row.get("trace_id") or "",
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        response_ids=np.array(row["response_ids"], np.int32),
        logprobs=np.array(row["logprobs"], np.float32),
        loss_mask=np.array(row["loss_mask"], np.uint8),
        versions=[
            VersionSpan(version, start, end)
            for version, start, end in zip(row.get("versions") or [], starts, ends, strict=True)
        ]
        if starts
        else [VersionSpan("", 0, tokens)],
        finish_reason=row.get("finish_reason") or "stop",
        reward=row["reward"],
        ref_logprobs=_floats(row.get("ref_logprobs")),
        advantages=_floats(row.get("advantages")),
        values=_floats(row.get("values")),
        teacher_logprobs=_floats(row.get("teacher_logprobs")),
    )


def _floats(values: list[float] | None) -> Floats | None:
    return None if values is None else np.array(values, np.float32)


def _advantage_difference(record: StepRecord, samples: dict[str, list[Sample]]) -> tuple[float | None, str]:
    """The stored advantages against those that the stored rewards give."""
    worst = 0.0
    try:
        for part in record.parts:
            stored = [sample for group in part for sample in samples[group]]
            again = [replace(sample, advantages=None) for sample in stored]
            compute_advantages(again, AlgorithmConfig.model_validate(record.algorithm))
            for one, other in zip(stored, again, strict=True):
                if one.advantages is None or other.advantages is None or not len(one.advantages):
                    continue
                worst = max(worst, float(np.abs(one.advantages - other.advantages).max()))
    except NightshiftError as error:  # an estimator that needs more than was stored
        return None, error.message
    return worst, ""


async def _weight_difference(ranks: LocalRanks, state_dir: Path, scratch: Path) -> float:
    from safetensors.torch import load_file

    await ranks.call("export", str(scratch / "replayed"), None)
    await ranks.call("load_state", str(state_dir))
    await ranks.call("export", str(scratch / "stored"), None)
    made, stored = (load_file(scratch / name / "model.safetensors") for name in ("replayed", "stored"))
    return max(float((made[name].double() - stored[name].double()).abs().max()) for name in stored)


def _checkpoint_before(run_dir: Path, schedule: dict[int, StepRecord], step: int) -> int:
    """The newest step before ``step`` with a checkpoint; 0 for the model's own weights."""
    return max(
        (number for number in schedule if number < step and _is_checkpoint(run_dir, schedule, number)), default=0
    )


def _is_checkpoint(run_dir: Path, schedule: dict[int, StepRecord], step: int) -> bool:
    """Whether the checkpoint of a step holds the weights that the schedule's step made."""
    folder = _state_dir(run_dir, step)
    return (folder / MANIFEST).is_file() and read_manifest(folder).get("policy_version") == schedule[step].version


def _state_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / "trainer" / f"global_step_{step}"


def _name(step: int) -> str:
    return f"replay/0/{step}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="services.trainer.replay")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("step", type=int)
    given = parser.parse_args(arguments)
    try:
        result = replay(given.run_dir, given.step)
    except NightshiftError as error:
        print(json.dumps({"error": error.to_dict()}))
        return error.exit_code
    print(json.dumps(asdict(result) | {"equal": result.equal}))
    return 0 if result.equal else 1


if __name__ == "__main__":
    sys.exit(main())
