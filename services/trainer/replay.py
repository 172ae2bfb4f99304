"""``python -m services.trainer.replay RUN_DIR STEP``: makes a step of a run again from what the run stored.

Starts from the newest checkpoint before the step, or from the model's own weights, and goes through the recorded
schedule up to the step: same groups in the same order and parts, same loss, same learning rate, on as many ranks; then
the critic's own steps likewise, where the run has a critic. In float32 on a CPU the weights are the run's to the bit.
Prints one JSON object; the exit code is 0 where nothing differs, 1 where something does, 2 where the run does not hold
what is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.algorithms import REGISTRY
from nightshift.config import JobSpec
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.config.load import read_resolved
from nightshift.gpu import find_device
from nightshift.wire.errors import BadInputError, NightshiftError
from nightshift.wire.experience import LossSpec, Sample, pack_loss, pack_samples
from nightshift.wire.schedule import StepRecord, read_schedule
from nightshift.wire.scoring import SequenceInput
from services.trainer.config import RankConfig
from services.trainer.coordinator import Coordinator, UpdateCall
from services.trainer.folders import MANIFEST, read_manifest
from services.trainer.local_ranks import LocalRanks
from services.trainer.stored_samples import advantage_difference, read_samples
from services.trainer.updates import PartKey

_POLICY, _CRITIC = "trainer", "critic"


@dataclass(slots=True)
class CriticResult:
    """What came of the critic's part of a step. See :class:`StepResult`."""

    recorded: str
    replayed: str
    same: bool | None


@dataclass(slots=True)
class StepResult:
    """What came of one step.

    Attributes:
        recorded: digest of the weights that the run published after it; empty where it has none.
        replayed: digest of the weights that were made now.
        same: whether they are equal; None where the run has no digest.
        advantage_difference: largest difference between the stored advantages (and returns of a critic) and those that
            follow from the stored rewards (and values); None where they were not computed.
        note: why they were not.
        critic: of the critic's own step; None without one.
    """

    step: int
    recorded: str
    replayed: str
    same: bool | None
    advantage_difference: float | None = None
    note: str = ""
    critic: CriticResult | None = None


@dataclass(slots=True)
class Replayed:
    """The whole result.

    Attributes:
        begun_at: step of the checkpoint that it started from; 0: the model's own weights.
        steps: every step that was made again.
        ranks: processes that made them, as many as in the run.
        weight_difference: largest absolute difference from the weights of the checkpoint of the last step; None where
            the run has no such checkpoint.
        critic_ranks: of the critic; 0 without one.
        critic_weight_difference: of the critic's weights, likewise.
        critic_note: why the critic's steps were not made again although the run has a critic.
        inexact: why the bits may differ although nothing is wrong; empty where they must not.
    """

    begun_at: int
    steps: list[StepResult]
    ranks: int = 1
    weight_difference: float | None = None
    critic_ranks: int = 0
    critic_weight_difference: float | None = None
    critic_note: str = ""
    inexact: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        if self.weight_difference or self.critic_weight_difference:
            return False
        parts = [made for step in self.steps for made in (step, step.critic) if made is not None]
        return all(made.same is not False for made in parts) and not any(
            step.advantage_difference for step in self.steps
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
    device = find_device(spec.resources.device)
    config = replace(RankConfig.from_spec(spec, device), weight_backend="safetensors")
    result = Replayed(begun_at, [], spec.trainer.ranks, inexact=inexact(config))
    async with _trainer(config, spec.trainer.ranks, spec, run_dir, begun_at) as (coordinator, ranks, scratch):
        for number in range(begun_at + 1, step + 1):
            result.steps.append(await _policy_step(coordinator, run_dir, schedule[number]))
        if _is_checkpoint(run_dir, schedule, step):
            result.weight_difference = await _weight_difference(ranks, _state_dir(run_dir, step), scratch)
    critic = spec.scorers.critic
    if critic is None:
        return result
    # One after the other: an update of either takes stored advantages and returns, and nothing of the other.
    if not all(schedule[made.step].critic for made in result.steps):
        result.critic_note = "the run did not record the critic's updates: it was made by an older version"
        return result
    result.critic_ranks = critic.ranks
    config = RankConfig.for_critic(spec, device)
    async with _trainer(config, critic.ranks, spec, run_dir, begun_at) as (coordinator, _, scratch):
        for made in result.steps:
            made.critic = await _critic_step(coordinator, run_dir, schedule[made.step])
        if _is_checkpoint(run_dir, schedule, step):
            state = _state_dir(run_dir, step, _CRITIC)
            result.critic_weight_difference = await _published_difference(coordinator, state, scratch / "store", step)
    return result


def inexact(config: RankConfig) -> str:
    """Why a step made again may have other bits, with the same ranks on the same machine; empty: it must not."""
    if config.device == "cuda" and not config.deterministic:
        return (
            "a GPU adds in no fixed order without pipeline.deterministic: weights may differ by rounding, which AdamW "
            "makes up to twice the learning rate a step where a gradient is all but zero"
        )
    return ""


@asynccontextmanager
async def _trainer(
    config: RankConfig, world: int, spec: JobSpec, run_dir: Path, begun_at: int
) -> AsyncIterator[tuple[Coordinator, LocalRanks, Path]]:
    """A trainer of the policy or the critic with the weights of a step, and a folder for what it writes."""
    with (
        tempfile.TemporaryDirectory(prefix="nightshift-replay-") as name,
        LocalRanks(config, world, spec.trainer.update_timeout_s) as ranks,
    ):
        scratch = Path(name)
        coordinator = Coordinator(ranks, await ranks.start(), scratch / "store")
        state = str(_state_dir(run_dir, begun_at, config.role)) if begun_at else ""
        await coordinator.load(state, _name(begun_at))
        yield coordinator, ranks, scratch


async def _policy_step(coordinator: Coordinator, run_dir: Path, record: StepRecord) -> StepResult:
    samples = read_samples(run_dir, record)
    difference, note = await _advantage_difference(coordinator, record, samples)
    await _make_step(coordinator, record, samples)
    digest = (await coordinator.publish(_name(record.step), [])).digest
    same = digest == record.digest if record.digest else None
    return StepResult(record.step, record.digest, digest, same, difference, note)


async def _make_step(coordinator: Coordinator, record: StepRecord, samples: dict[str, list[Sample]]) -> None:
    loss, left_out = LossSpec(**record.loss), set(record.left_out)
    for number, groups in enumerate(record.parts):
        final = number == len(record.parts) - 1
        chosen = [sample for group in groups for sample in samples[group] if sample.sample_id not in left_out]
        spec = loss if final else replace(loss, total_tokens=0, total_sequences=0)
        await coordinator.update(_call(record, number, final, chosen, spec, record.learning_rate))


async def _critic_step(coordinator: Coordinator, run_dir: Path, record: StepRecord) -> CriticResult:
    made, samples = record.critic, read_samples(run_dir, record)
    left_out = set(made["left_out"])
    chosen = [
        replace(sample, advantages=None, ref_logprobs=None, teacher_logprobs=None)
        for groups in record.parts
        for group in groups
        for sample in samples[group]
        if sample.sample_id not in left_out
    ]
    await coordinator.update(_call(record, 0, True, chosen, LossSpec(**made["loss"]), made["learning_rate"]))
    digest = (await coordinator.publish(_name(record.step), [])).digest
    return CriticResult(made["digest"], digest, digest == made["digest"] if made["digest"] else None)


def _call(
    record: StepRecord, part: int, final: bool, samples: Sequence[Sample], loss: LossSpec, rate: float
) -> UpdateCall:
    return UpdateCall(
        key=PartKey(record.step, 0, part),
        expect_version=_name(record.step - 1),
        new_version=_name(record.step),
        final=final,
        samples=pack_samples(list(samples)),
        loss=pack_loss(loss),
        learning_rate=rate,
    )


async def _advantage_difference(
    coordinator: Coordinator, record: StepRecord, samples: dict[str, list[Sample]]
) -> tuple[float | None, str]:
    """The stored advantages against those that the stored rewards give; the weights are those before the step."""
    config = AlgorithmConfig.model_validate(record.algorithm)
    estimator = REGISTRY.get(config.estimator)
    worst = 0.0
    try:
        for part in record.parts:
            stored = [sample for group in part for sample in samples[group]]
            target = None
            if estimator is not None and estimator.needs_target:
                target = await _log_probs(coordinator, stored, record)
            worst = max(worst, advantage_difference(stored, config, target))
    except NightshiftError as error:  # an estimator that needs more than was stored
        return None, error.message
    return worst, ""


async def _log_probs(coordinator: Coordinator, samples: Sequence[Sample], record: StepRecord) -> list[Any]:
    """As the orchestrator asked for them."""
    sequences = [
        SequenceInput(
            id=sample.sample_id,
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
            temperature=record.loss["temperature"],
        )
        for sample in samples
        if len(sample.response_ids)
    ]
    results = await coordinator.log_probs(sequences, _name(record.step - 1))
    found = {result["id"]: result["logprobs"] for result in results}
    return [found.get(sample.sample_id, np.zeros(0, np.float32)) for sample in samples]


async def _weight_difference(ranks: LocalRanks, state_dir: Path, scratch: Path) -> float:
    await ranks.call("export", str(scratch / "replayed"), None)
    await ranks.call("load_state", str(state_dir))
    await ranks.call("export", str(scratch / "stored"), None)
    return _largest(*(scratch / name / "model.safetensors" for name in ("replayed", "stored")))


async def _published_difference(coordinator: Coordinator, state_dir: Path, store: Path, step: int) -> float:
    """As :func:`_weight_difference`, of a critic, which is published in its own precision."""
    made = (await coordinator.publish(_name(step), [])).update_info["path"]
    kept = (store / made).rename(store / "replayed.safetensors")
    await coordinator.load(str(state_dir), _name(step))
    stored = (await coordinator.publish(_name(step), [])).update_info["path"]
    return _largest(kept, store / stored)


def _largest(one: Path, other: Path) -> float:
    """Largest absolute difference between the tensors of two files."""
    from safetensors.torch import load_file

    made, stored = load_file(one), load_file(other)
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


def _state_dir(run_dir: Path, step: int, role: str = _POLICY) -> Path:
    return run_dir / "checkpoints" / role / f"global_step_{step}"


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
