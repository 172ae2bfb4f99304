"""The update of one step: its groups go to the trainer in one part, or in several as they become ready."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from nightshift.algorithms import AdvantageReport, compute_advantages
from nightshift.config import JobSpec
from nightshift.wire.errors import NightshiftError
from nightshift.wire.events import EventLog
from nightshift.wire.experience import LossSpec, Sample
from nightshift.wire.schedule import StepRecord
from nightshift.wire.version import PolicyVersion
from orchestrator.runner.batch import loss_spec, trainable
from orchestrator.runner.critic import Critic
from orchestrator.runner.group import Group
from orchestrator.runner.tensors import tensors_inside, tensors_of
from orchestrator.runner.together import together
from orchestrator.runner.trainer import AttemptFailedError, TrainerClient, Updated

_FIRST_PAUSE_S = 0.2


class StepUpdate:
    """Groups on their way into one optimiser step.

    The trainer adds up partial sums. What they are divided by, the totals of the batch, is known to the last part alone
    where there are several; a batch that comes whole carries them at once. A part that fails takes the attempt with
    it: all groups are sent again, as one part of a new attempt, and the trainer forgets what it had added up.

    Attributes:
        groups: those that the trainer was given, in order.
        parts: how many of them each part of the present attempt holds.
        attempt: number of the attempt, from 0.
        waited: seconds in which the trainer had nothing to do for want of groups.
        failures: why groups failed that would have come into this step.
        report: what the advantage stage counted; None before the first part.
        advantage_seconds: what it took.
        loss: what the last part carried, the totals included; None before.
        critic_made: what the schedule says of the critic's step; empty before it, and without a critic.

    Args:
        step: number of the step, from 1.
        expect: version of the weights that it starts from.
        new: version that it makes.
        learning_rate: of the step.
        critic: the critic of the run; it learns from the whole batch while the policy takes its last part.
        critic_rate: learning rate of its step.
    """

    def __init__(
        self,
        spec: JobSpec,
        trainer: TrainerClient,
        events: EventLog,
        *,
        step: int,
        expect: str,
        new: str,
        rate: float,
        critic: Critic | None = None,
        critic_rate: float = 0.0,
    ) -> None:
        self.step, self.expect, self.new, self.learning_rate = step, expect, new, rate
        self.groups: list[Group] = []
        self.parts: list[int] = []
        self.attempt = 0
        self.waited = 0.0
        self.failures: list[NightshiftError] = []
        self.report: AdvantageReport | None = None
        self.advantage_seconds = 0.0
        self.loss: LossSpec | None = None
        self.critic_made: dict[str, Any] = {}
        self._spec = spec
        self._trainer = trainer
        self._events = events
        self._critic = critic
        self._critic_rate = critic_rate
        self._seconds = 0.0
        self._peak = 0

    @property
    def warming_up(self) -> bool:
        """Whether the step trains the critic alone."""
        return self._critic is not None and self._critic.warming_up(self.step - 1)

    @property
    def samples(self) -> list[Sample]:
        """All samples of its groups."""
        return [sample for group in self.groups for sample in group.samples]

    async def add(self, groups: Sequence[Group], *, final: bool, traceparent: str) -> Updated:
        """Hands groups to the trainer; with the last ones it makes the step.

        Returns:
            What the trainer answered, with the seconds of all parts so far.

        Raises:
            NightshiftError: the trainer failed, in all attempts where another one could have helped.
        """
        await self._weigh(groups)
        self.groups += groups
        if not final or self._critic is None:
            return await self._add(groups, final, traceparent)
        steps: list[Coroutine[Any, Any, Any]] = [
            self._add(groups, final, traceparent),
            self._critic.update(
                trainable(self.samples),
                step=self.step,
                expect=self.expect,
                new=self.new,
                rate=self._critic_rate,
                traceparent=traceparent,
                debug=self._spec.tracking.debug_mode,
            ),
        ]
        updated, metrics = await together(steps)
        self.critic_made = dict(self._critic.made)
        if self._critic.tensors:
            told = tensors_inside(self._critic.tensors)
            self._events.append("tensors", step=self.step, part=len(self.parts) - 1, tensors=told)
        return Updated(updated.stepped, updated.metrics | metrics, updated.seconds, updated.peak_memory_bytes)

    async def loss_of(self, groups: Sequence[Group], traceparent: str) -> dict[str, float]:
        """Metrics that the step would report of these groups as its whole batch; no step is made.

        Raises:
            NightshiftError: the trainer failed.
        """
        await self._weigh(groups)
        samples = [] if self.warming_up else trainable([sample for group in groups for sample in group.samples])
        rollout = self._spec.rollout
        loss = loss_spec(self._spec.algorithm, samples, rollout.temperature, rollout.max_response_length)
        return await self._trainer.loss(samples, loss, version=self.expect, traceparent=traceparent)

    async def _add(self, groups: Sequence[Group], final: bool, traceparent: str) -> Updated:
        part = list(groups)
        pause = _FIRST_PAUSE_S
        while True:
            try:
                updated = await self._send(part, final, traceparent)
                break
            except AttemptFailedError as error:
                if self.attempt >= self._spec.pipeline.retries:
                    raise
                self.attempt += 1
                self._events.append(
                    "warning",
                    role="trainer",
                    message=f"{error.message}; step {self.step} is tried again from its first group, attempt "
                    f"{self.attempt}",
                )
                part, self.parts = self.groups, []
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)
        if self._spec.tracking.debug_mode:
            samples = [sample for group in part for sample in group.samples]
            self._events.append(
                "tensors",
                step=self.step,
                part=len(self.parts),
                tensors=tensors_of(samples)
                + tensors_inside([item for group in part for item in group.tensors])
                + tensors_inside(updated.tensors),
            )
        self.parts.append(len(part))
        self._seconds += updated.seconds
        self._peak = max(self._peak, updated.peak_memory_bytes)
        return Updated(updated.stepped, updated.metrics, self._seconds, self._peak)

    async def _weigh(self, groups: Sequence[Group]) -> None:
        began = time.monotonic()
        samples = [sample for group in groups for sample in group.samples]
        if self._critic is None:
            report = compute_advantages(samples, self._spec.algorithm)
        else:
            report = await self._critic.advantages(samples, self._trainer, self.expect)
        self.report = report if self.report is None else self.report + report
        self.advantage_seconds += time.monotonic() - began

    async def _send(self, groups: Sequence[Group], final: bool, traceparent: str) -> Updated:
        rollout = self._spec.rollout
        whole = trainable(self.samples) if final and not self.warming_up else []
        self.loss = loss_spec(self._spec.algorithm, whole, rollout.temperature, rollout.max_response_length)
        return await self._trainer.update(
            [] if self.warming_up else trainable([sample for group in groups for sample in group.samples]),
            self.loss,
            step=self.step,
            expect=self.expect,
            new=self.new,
            learning_rate=self.learning_rate,
            traceparent=traceparent,
            attempt=self.attempt,
            part=len(self.parts),
            final=final,
            debug=self._spec.tracking.debug_mode,
        )


def step_record(spec: JobSpec, update: StepUpdate, stepped: bool, digest: str) -> StepRecord:
    """What the schedule says of an update that was applied.

    Args:
        stepped: whether there was anything to learn from.
        digest: of the weights that were published after it.
    """
    bounds = itertools.pairwise([0, *itertools.accumulate(update.parts)])
    usable = {sample.sample_id for sample in trainable(update.samples)}
    sent = set() if update.warming_up else usable
    unusable = [sample.sample_id for sample in update.samples if sample.sample_id not in usable]
    return StepRecord(
        step=update.step,
        expect=update.expect,
        version=update.new,
        attempt=update.attempt,
        parts=[[group.group_id for group in update.groups[first:end]] for first, end in bounds],
        versions={group.group_id: _extremes(group) for group in update.groups},
        left_out=[sample.sample_id for sample in update.samples if sample.sample_id not in sent],
        learning_rate=update.learning_rate,
        loss=asdict(update.loss or LossSpec()),
        algorithm=spec.algorithm.model_dump(mode="json"),
        stepped=stepped,
        digest=digest,
        time=time.time(),
        critic=update.critic_made | {"left_out": unusable} if update.critic_made else {},
    )


def _extremes(group: Group) -> list[str]:
    """The oldest and the newest version among the tokens of a group."""
    versions = {span.version for sample in group.samples for span in sample.versions}
    ordered = sorted(versions, key=lambda version: PolicyVersion.parse(version).step)
    return [ordered[0], ordered[-1]] if ordered else []
