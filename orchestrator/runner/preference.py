"""One attempt at a job on preference pairs: no sampling, no rewards; reference, trainer and checkpoints as ever."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.algorithms.schedule import learning_rate
from nightshift.config import JobSpec
from nightshift.data import Cursor, Tokenizer
from nightshift.data.preferences import Pair, PairSet, load_pairs
from nightshift.wire.errors import RoleError
from nightshift.wire.events import EventLog
from nightshift.wire.experience import FINISH_STOP, LossSpec, Sample, VersionSpan
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.books import Books
from orchestrator.runner.checkpoints import BY_CLOCK, Checkpoints
from orchestrator.runner.connect import connect_trainer
from orchestrator.runner.inputs import make_cursor, rows_per_epoch
from orchestrator.runner.save_clock import SaveClock
from orchestrator.runner.scorer import ScorerClient, require_ids
from orchestrator.runner.services import Services, TrainerAddress
from orchestrator.runner.start import Start
from orchestrator.runner.tensors import tensors_inside, tensors_of
from orchestrator.runner.tracing import Tracing
from orchestrator.runner.tracking import open_tracking
from orchestrator.runner.trainer import TrainerClient


class PreferenceInputs:
    """Tokenizer, pairs for training and evaluation, and the number of steps.

    Raises:
        BadInputError: the data cannot be used.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.tokenizer = Tokenizer.load(
            spec.model.tokenizer or spec.model.path, spec.data.chat_template, model=spec.model.path
        )
        longest = spec.rollout.max_response_length
        self.train: PairSet = load_pairs(spec.data, spec.data.train_files, self.tokenizer, longest)
        files = spec.data.test_files
        self.test = load_pairs(spec.data, files, self.tokenizer, longest).pairs if files else []
        self.total_steps = spec.steps_for(rows_per_epoch(spec, self.train))


class PreferenceAttempt:
    """Steps over batches of pairs, from where the run stands to its end or to the loss of the trainer.

    Attributes:
        step: steps in the trainer's weights.
        pipeline: always None: nothing is sampled.
    """

    pipeline = None

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        events: EventLog,
        inputs: PreferenceInputs,
        start: Start,
        books: Books,
        checkpoints: Checkpoints,
        tracing: Tracing,
    ) -> None:
        self.step = start.step
        self._spec = spec
        self._run_dir = run_dir
        self._events = events
        self._inputs = inputs
        self._start = start
        self._books = books
        self._checkpoints = checkpoints
        self._tracing = tracing
        self._tracking = open_tracking(run_dir, run_dir.name, spec.tracking)
        self._closing: list[Any] = []
        self._stopping = self._running = False
        self._committed = start.step if start.manifest else None
        self._export_owed = bool(start.manifest and start.manifest.get(BY_CLOCK))
        self._save_clock = SaveClock(spec.trainer.save_minutes, time.monotonic())

    def stop(self) -> bool:
        """Asks for an end after the step in progress; False where no step can be in progress yet."""
        self._stopping = True
        return self._running

    async def close(self) -> None:
        """Closes all connections."""
        for item in self._closing:
            await item.close()
        self._tracking.close()

    async def run(self, services: Services, address: TrainerAddress) -> bool:
        """Runs to the end of the job; returns False where :meth:`stop` ended it earlier.

        Raises:
            TrainerLostError: the trainer's weights are gone.
            NightshiftError: a role failed for good.
        """
        spec, start = self._spec, self._start
        trainer = connect_trainer(address, spec, self._run_dir, start.job_trace_id)
        self._closing.append(trainer)
        if services.reference is None:
            raise RoleError("services.json names no reference, which preference pairs need", role="reference")
        reference = ScorerClient(
            "reference",
            services.reference.url,
            services.reference.application,
            token=services.reference.token,
            run_id=self._run_dir.name,
            job_trace_id=start.job_trace_id,
            timeout_s=spec.scorers.timeout_s,
            away_s=spec.pipeline.role_timeout_s,
            batch_samples=1,
        )
        self._closing.append(reference)
        await trainer.load(start.state_dir, str(start.lineage.version(start.step)))
        self._tracking.drop_after(start.step)
        cursor = make_cursor(spec, self._inputs.train)
        if start.manifest is not None:
            cursor.restore(start.manifest["cursor"])
        total = self._inputs.total_steps
        self._events.append(
            "job",
            state="running",
            steps=total,
            lineage=start.lineage.number,
            step=self.step,
            detail=f"{self._inputs.train.summary()}; {total} steps of {spec.rollout.batch_size} pairs",
        )
        self._running = True
        if self._inputs.test and self.step not in self._tracking.logged("evaluation"):
            await self._evaluate(trainer, reference)
        clock = self._save_clock = SaveClock(spec.trainer.save_minutes, time.monotonic())
        while self.step < total and not self._stopping:
            pairs = [self._inputs.train.pairs[cursor.next()[1]] for _ in range(spec.rollout.batch_size)]
            await self._make_step(pairs, trainer, reference)
            frequency = spec.trainer.test_freq
            if self._inputs.test and ((frequency and self.step % frequency == 0) or self.step == total):
                await self._evaluate(trainer, reference)
            if spec.trainer.save_freq and self.step % spec.trainer.save_freq == 0:
                await self._checkpoint(trainer, cursor)
            elif self.step < total and clock.due(time.monotonic()):
                await self._checkpoint(trainer, cursor, by_clock=True)
        await self._checkpoint(trainer, cursor)
        self._events.append(
            "summary",
            step=self.step,
            policy_version=str(start.lineage.version(self.step)),
            metrics={},
            ledger=self._books.ledger.balance(),
            job_trace_id=self._tracing.job_trace_id,
            time_ended=time.time(),
        )
        return self.step >= total

    async def _make_step(self, pairs: Sequence[Pair], trainer: TrainerClient, reference: ScorerClient) -> None:
        spec, began = self._spec, time.monotonic()
        config, lineage = spec.trainer, self._start.lineage
        expect, new = str(lineage.version(self.step)), str(lineage.version(self.step + 1))
        span = self._tracing.job_span("optimizer_step", role="trainer", step=self.step + 1, policy_version=new)
        with self._tracing.within(span) as traceparent:
            samples = await self._scored(pairs, reference, expect, traceparent)
            reference_s = time.monotonic() - began
            rate = learning_rate(
                self.step,
                peak=config.learning_rate,
                schedule=config.lr_schedule,
                warmup_steps=config.warmup_steps,
                total_steps=self._inputs.total_steps,
            )
            updated = await trainer.update(
                samples,
                preference_spec(spec, samples),
                step=self.step + 1,
                expect=expect,
                new=new,
                learning_rate=rate,
                traceparent=traceparent,
                debug=spec.tracking.debug_mode,
            )
        self.step += 1
        if spec.tracking.debug_mode:
            tensors = tensors_of(samples) + tensors_inside(updated.tensors)
            self._events.append("tensors", step=self.step, part=0, tensors=tensors)
        seconds = time.monotonic() - began
        metrics = updated.metrics | {
            "pairs": float(len(pairs)),
            "timing/ref": reference_s,
            "timing/update_actor": updated.seconds,
            "timing/step": seconds,
            "samples_per_second": len(samples) / max(1e-9, seconds),
        }
        metrics.setdefault("lr", rate)
        self._tracking.log(self.step, metrics)
        self._events.append("step", step=self.step, steps=self._inputs.total_steps, metrics=metrics)

    async def _scored(
        self, pairs: Sequence[Pair], reference: ScorerClient, version: str, traceparent: str
    ) -> list[Sample]:
        """Chosen and rejected samples in turn, with log-probs of the reference."""
        samples = pair_samples(pairs, self._tracing.job_trace_id, version)
        inputs = [
            SequenceInput(id=sample.sample_id, prompt_ids=sample.prompt_ids, response_ids=sample.response_ids)
            for sample in samples
        ]
        scored = await reference.score(inputs, traceparent)
        for sample, result in zip(samples, scored.results, strict=True):
            require_ids(result, {"id": sample.sample_id, "response_ids": sample.response_ids}, "reference")
            sample.ref_logprobs = np.asarray(result["logprobs"], np.float32)
        return samples

    async def _evaluate(self, trainer: TrainerClient, reference: ScorerClient) -> None:
        """Implicit rewards on the held-out pairs."""
        began, size = time.monotonic(), self._spec.rollout.batch_size
        version = str(self._start.lineage.version(self.step))
        margins: list[float] = []
        for at in range(0, len(self._inputs.test), size):
            samples = await self._scored(self._inputs.test[at : at + size], reference, version, "")
            values = await trainer.log_probs(samples, 1.0, version, "")
            gains = [
                float((value - sample.ref_logprobs).sum())
                for sample, value in zip(samples, values, strict=True)
                if sample.ref_logprobs is not None
            ]
            margins += [chosen - rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
        scaled = self._spec.algorithm.preference_beta * np.array(margins)
        metrics = {
            "eval/score": float((scaled > 0).mean()),
            "eval/margin": float(scaled.mean()),
            "eval/prompts": float(len(margins)),
            "eval/seconds": time.monotonic() - began,
        }
        self._tracking.log(self.step, metrics, kind="evaluation")
        self._events.append("evaluation", step=self.step, policy_version=version, metrics=metrics)

    async def _checkpoint(self, trainer: TrainerClient, cursor: Cursor, *, by_clock: bool = False) -> None:
        began = time.monotonic()
        export = str(self._checkpoints.export_dir(self.step)) if self._spec.checkpoint.export and not by_clock else ""
        if self._committed == self.step:
            if self._export_owed and export:
                await trainer.save({}, state_dir="", export_dir=export, traceparent="")
                self._export_owed = False
                self._events.append("checkpoint", step=self.step, path=export)
            return
        lineage = self._start.lineage
        manifest = {
            "run_id": lineage.run,
            "lineage": lineage.number,
            "branches": lineage.branches,
            "step": self.step,
            "total_steps": self._inputs.total_steps,
            "policy_version": str(lineage.version(self.step)),
            "issued": 0,
            "cursor": cursor.state(),
            "job_trace_id": self._tracing.job_trace_id,
            "time": time.time(),
            BY_CLOCK: by_clock,
        }
        state = str(self._checkpoints.state_dir(self.step))
        span = self._tracing.job_span("checkpoint", step=self.step)
        with self._tracing.within(span) as traceparent:
            await trainer.save(manifest, state_dir=state, export_dir=export, traceparent=traceparent)
        self._checkpoints.keep_manifest(self.step, manifest)
        self._committed, self._export_owed = self.step, by_clock
        self._save_clock.saved(began, time.monotonic())
        await trainer.forget(self._checkpoints.rotate(self._spec.checkpoint.keep))
        self._events.append("checkpoint", step=self.step, path=export or state)


def pair_samples(pairs: Sequence[Pair], trace_id: str, version: str) -> list[Sample]:
    """Samples of pairs, chosen and rejected in turn; nobody sampled them, so that their log-probs are 0."""
    samples = []
    for at, pair in enumerate(pairs):
        for slot, ids in enumerate((pair.chosen_ids, pair.rejected_ids)):
            samples.append(
                Sample(
                    sample_id=f"p{at}.{slot}",
                    group_id=f"p{at}",
                    trace_id=trace_id,
                    prompt_ids=pair.prompt_ids,
                    response_ids=ids,
                    logprobs=np.zeros(len(ids), np.float32),
                    loss_mask=np.ones(len(ids), np.uint8),
                    versions=[VersionSpan(version, 0, len(ids))],
                    finish_reason=FINISH_STOP,
                    reward=float(slot == 0),
                    advantages=np.zeros(len(ids), np.float32),
                )
            )
    return samples


def preference_spec(spec: JobSpec, samples: Sequence[Sample]) -> LossSpec:
    """The loss of a batch of pairs."""
    config = spec.algorithm
    smoothing = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    return LossSpec(
        policy_loss=config.policy_loss,
        aggregation="seq_mean_token_sum",
        total_tokens=sum(sample.trained_tokens for sample in samples),
        total_sequences=len(samples),
        options={"beta": config.preference_beta, **smoothing},
    )
