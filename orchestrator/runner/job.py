"""Wires one run together: reads its folder, connects the roles, runs the pipeline, writes the end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.config import JobSpec
from nightshift.config.load import read_resolved
from nightshift.data import Cursor, Prompt, PromptSet, Tokenizer, load_prompts
from nightshift.wire import telemetry
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError, WireError
from nightshift.wire.events import EventLog
from nightshift.wire.scoring import SequenceInput
from nightshift.wire.trace import TraceContext, new_span_id, new_trace_id
from nightshift.wire.version import Lineage, PolicyVersion
from orchestrator.api.otlp import TraceReceiver
from orchestrator.runner.admission import Admission
from orchestrator.runner.books import Books
from orchestrator.runner.checkpoints import Checkpoints
from orchestrator.runner.evaluate import Evaluator
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.group import Group, GroupRunner, start_group_span
from orchestrator.runner.health import PROBE_LIMITS
from orchestrator.runner.ledger import GroupRecord, GroupState, Ledger
from orchestrator.runner.pipeline import Pipeline
from orchestrator.runner.rollouts import drop_rollouts_after
from orchestrator.runner.scorer import ScorerClient
from orchestrator.runner.services import ScorerAddress, Services, read_services, wait_for_services
from orchestrator.runner.spool import Spool
from orchestrator.runner.stepper import Stepper
from orchestrator.runner.tracing import SpanEvents, Tracing
from orchestrator.runner.tracking import Tracking
from orchestrator.runner.trainer import TrainerClient
from orchestrator.store.state import StateStore

_log = logging.getLogger(__name__)
#: Sequences, and tokens of each, on which servers prove that they hold the published weights.
_PROBES, _PROBE_TOKENS = 2, 48


@dataclass(slots=True)
class Resume:
    """Where a run goes on."""

    lineage: Lineage
    job_trace_id: str
    step: int
    state_dir: str
    records: list[GroupRecord]
    manifest: dict[str, Any] | None = None


class Job:
    """One run in its folder.

    Args:
        run_dir: the run's folder, with ``job.yaml``.
        otlp_port: port of the span receiver; 0 for any free one.
    """

    def __init__(self, run_dir: Path, otlp_port: int) -> None:
        self.run_dir = run_dir
        self.run_id = run_dir.name
        self.spec: JobSpec = read_resolved(run_dir / "job.yaml")
        self.events = EventLog(run_dir / "events.jsonl", self.run_id)
        self._otlp_port = otlp_port
        self._pipeline: Pipeline | None = None
        self._main: asyncio.Task[bool] | None = None
        self._stopping = False

    def stop(self) -> None:
        """Asks for a checkpoint and an end; called by signals."""
        self._stopping = True
        if self._pipeline is not None:
            self._pipeline.stop()
        elif self._main is not None:
            self._main.cancel()

    async def run(self, *, resume: bool) -> int:
        """Runs the job; returns the exit code."""
        state = "failed"
        self.events.append("job", state="starting")
        self._main = asyncio.create_task(self._run(resume))
        try:
            finished = await self._main
            state = "succeeded" if finished else "interrupted"
            self.events.append("job", state=state)
            return 0 if finished else 130
        except asyncio.CancelledError:
            self.events.append("job", state="interrupted", error="stopped before the first step")
            return 130
        except NightshiftError as error:
            self.events.append("job", state=state, error=str(error), role=error.role)
            return error.exit_code
        except Exception as error:
            # Not foreseen: the traceback goes to the log, and the run still ends with a sentence.
            _log.exception("the job failed")
            self.events.append("job", state=state, error=f"{type(error).__name__}: {error}", role="orchestrator")
            return 1

    async def _run(self, resume: bool) -> bool:
        spec = self.spec
        receiver = TraceReceiver(lambda span: self.events.append("span", **span), spec.tracking.otlp_endpoint)
        await receiver.start(self._otlp_port)
        books: Books | None = None
        closing: list[Any] = []
        try:
            tokenizer, train, test, total_steps = load_inputs(spec)
            for message in train.warnings:
                self.events.append("warning", role="job", message=message)
            store = StateStore(os.environ.get("NIGHTSHIFT_DATABASE_URL") or f"sqlite:///{self.run_dir / 'state.db'}")
            checkpoints = Checkpoints(self.run_dir)
            start = self._where(store, checkpoints, resume)
            books = Books(store, self.run_id, Ledger.of(start.records), self.events, spec.pipeline.role_timeout_s)
            tracer = telemetry.setup(
                "orchestrator",
                spec.tracking.otlp_endpoint,
                self.run_id,
                [SpanEvents(lambda span: self.events.append("span", **span))],
            )
            tracing = Tracing(tracer, TraceContext(start.job_trace_id, new_span_id(), True))
            await books.save_run(start.lineage, start.job_trace_id, "running")

            timeout = spec.rollout.start_timeout_s + spec.scorers.start_timeout_s + spec.trainer.start_timeout_s
            services = await wait_for_services(self.run_dir, timeout)
            trainer = TrainerClient(
                services.trainer_url,
                run_id=self.run_id,
                job_trace_id=start.job_trace_id,
                update_timeout_s=spec.trainer.update_timeout_s,
                away_s=min(60.0, spec.pipeline.role_timeout_s),
            )
            closing.append(trainer)
            rewards, reference = self._scorers(services, start.job_trace_id)
            closing += [client for _, _, client in rewards] + ([reference] if reference else [])
            await self._check_roles(trainer, rewards, reference, tokenizer)
            await trainer.load(start.state_dir, str(start.lineage.version(start.step)))

            fleet = self._fleet(services, train)
            closing.append(fleet)
            spool = Spool(self.run_dir / "spool")
            runner = GroupRunner(spec, self.run_id, tokenizer, fleet, rewards, reference, tracing)
            resumed = await self._take_up(books, spool, start, train, tracing)
            cursor = Cursor(len(train.prompts), spec.trainer.seed, spec.data.shuffle)
            for _ in range(books.ledger.issued):
                cursor.next()
            trained = books.ledger.counts[GroupState.TRAINED]
            admission = Admission(
                spec.pipeline.max_staleness,
                spec.rollout.batch_size,
                total_steps,
                finished_groups=trained,
                finished_steps=start.step,
                max_in_flight=spec.pipeline.max_groups_in_flight,
            )
            tracking = Tracking(self.run_dir, tensorboard=spec.tracking.tensorboard)
            closing.append(_Closer(tracking.close))
            tracking.drop_after(start.step)
            drop_rollouts_after(self.run_dir / "rollouts", start.step)
            stepper = Stepper(
                spec,
                self.run_dir,
                total_steps,
                lineage=start.lineage,
                step=start.step,
                trainer=trainer,
                fleet=fleet,
                books=books,
                spool=spool,
                evaluator=Evaluator(spec, self.run_id, tokenizer, test, fleet, rewards, tracing),
                checkpoints=checkpoints,
                tracking=tracking,
                tracing=tracing,
                events=self.events,
                admission=admission,
                probe=self._probe(train),
                cursor_state=cursor.state,
                generating=runner.busy,
                manifest=start.manifest,
            )
            pipeline = Pipeline(
                spec,
                total_steps,
                prompts=train.prompts,
                cursor=cursor,
                books=books,
                fleet=fleet,
                runner=runner,
                stepper=stepper,
                spool=spool,
                tracing=tracing,
                events=self.events,
                admission=admission,
            )
            self.events.append(
                "job",
                state="running",
                steps=total_steps,
                lineage=start.lineage.number,
                step=start.step,
                detail=f"{train.summary()}; {steps_sentence(len(train.prompts), spec.rollout.batch_size, total_steps)}",
            )
            fleet.start()
            await stepper.begin()
            self._pipeline = pipeline
            if self._stopping:
                pipeline.stop()
            finished = await pipeline.run(resumed)
            await stepper.checkpoint()
            tracing.end()
            await books.save_run(start.lineage, start.job_trace_id, "succeeded" if finished else "interrupted")
            self._summarise(stepper, books, tracing)
            return finished
        finally:
            for item in closing:
                await item.close()
            if books is not None:
                books.close()
            await asyncio.to_thread(telemetry.shutdown)
            await receiver.stop()

    def _where(self, store: StateStore, checkpoints: Checkpoints, resume: bool) -> Resume:
        known, records = store.load(self.run_id)
        committed = checkpoints.committed()
        manifest = checkpoints.manifest(committed[-1]) if committed else None
        if manifest is not None and len(records) < manifest["issued"]:
            raise BadInputError(
                f"the database knows {len(records)} prompt groups of this run, its checkpoint of step {committed[-1]} "
                f"{manifest['issued']}: with it, groups would be trained twice",
                role="job",
                fix="Restore the run's state.db, or the database that NIGHTSHIFT_DATABASE_URL names",
            )
        if known is None:
            return Resume(Lineage(self.run_id), _job_trace_id(), 0, "", [])
        if not resume:
            raise BadInputError(f"{self.run_dir} holds a run already", role="job", fix="Give --resume to go on with it")
        for folder in checkpoints.broken():
            self.events.append("warning", role="job", message=f"{folder} was never completed and is not used")
        step = committed[-1] if committed else 0
        state_dir = str(checkpoints.state_dir(step)) if committed else ""
        lineage = known.lineage.branch(known.lineage.number + 1, step)
        return Resume(lineage, known.job_trace_id, step, state_dir, records, manifest)

    async def _take_up(
        self, books: Books, spool: Spool, start: Resume, train: PromptSet, tracing: Tracing
    ) -> list[tuple[GroupRecord, Group | None]]:
        """Groups in flight at the last commit: with their experience where every token is from an ancestor."""
        kept = {}
        for index in spool.indices():
            samples = spool.get(index)
            versions = {span.version for sample in samples or [] for span in sample.versions}
            if samples and all(start.lineage.contains(PolicyVersion.parse(version)) for version in versions):
                kept[index] = samples
            else:
                spool.remove([index])
        if start.records:
            await books.roll_back(start.step, frozenset(kept))
        resumed: list[tuple[GroupRecord, Group | None]] = []
        for record in books.ledger.records.values():
            if record.state is GroupState.RUNNING:
                resumed.append((record, None))
            elif record.state is GroupState.READY:
                prompt = train.prompts[record.row]
                span, _ = start_group_span(tracing, record.index, prompt, record.epoch, record.trace_id)
                group = Group(record.index, prompt, record.epoch, record.trace_id, start.step, span)
                group.samples = kept[record.index]
                resumed.append((record, group))
        return resumed

    def _scorers(
        self, services: Services, job_trace_id: str
    ) -> tuple[list[tuple[str, float, ScorerClient]], ScorerClient | None]:
        scorers, pipeline = self.spec.scorers, self.spec.pipeline

        def client(role: str, address: ScorerAddress, sample_s: float = 0.0) -> ScorerClient:
            return ScorerClient(
                role,
                address.url,
                address.application,
                run_id=self.run_id,
                job_trace_id=job_trace_id,
                timeout_s=scorers.timeout_s,
                sample_s=sample_s,
                away_s=pipeline.role_timeout_s,
                # Which groups fall into one call is a matter of timing, and the shape of a batch moves the last bits.
                batch_samples=1 if pipeline.deterministic else scorers.batch_samples,
                batch_wait_s=scorers.batch_wait_ms / 1000,
            )

        # Samples that hang are replaced within their limit; steadily slow ones may take it one after the other.
        rewards = [
            (address.name, reward.weight, client("reward", address, reward.timeout_s))
            for address, reward in zip(services.rewards, self.spec.rewards, strict=True)
        ]
        reference = services.reference
        return rewards, client("reference", reference) if reference else None

    async def _check_roles(
        self,
        trainer: TrainerClient,
        rewards: Sequence[tuple[str, float, ScorerClient]],
        reference: ScorerClient | None,
        tokenizer: Tokenizer,
    ) -> None:
        described = await trainer.describe()
        if described.vocab_size < tokenizer.vocab_size:
            raise RoleError(
                f"the model has {described.vocab_size} tokens, the tokenizer {tokenizer.vocab_size}", role="trainer"
            )
        for _, _, client in rewards:
            await client.describe()
        if reference is not None:
            answer = await reference.describe()
            if answer.vocab_size and answer.vocab_size != described.vocab_size:
                raise RoleError(
                    f"the reference has {answer.vocab_size} tokens, the policy {described.vocab_size}",
                    role="reference",
                    fix="The reference must use the policy's vocabulary",
                )

    def _fleet(self, services: Services, train: PromptSet) -> Fleet:
        rollout, pipeline = self.spec.rollout, self.spec.pipeline

        def refresh() -> Any:
            current = read_services(self.run_dir)
            return current.rollout if current else None

        return Fleet(
            services.rollout,
            events=self.events,
            refresh=refresh,
            probe_inputs=self._probe(train),
            limits=PROBE_LIMITS[rollout.dtype],
            request_timeout_s=rollout.request_timeout_s,
            away_s=pipeline.role_timeout_s,
            retries=pipeline.retries,
            drain=pipeline.weight_update == "drain",
            # A rest that another server draws is no function of the seed.
            flush_tokens=0 if pipeline.deterministic else rollout.flush_tokens,
            max_staleness=pipeline.max_staleness,
        )

    def _probe(self, train: PromptSet) -> list[SequenceInput]:
        probes = []
        for prompt in train.prompts[:_PROBES]:
            ids = prompt.prompt_ids[:_PROBE_TOKENS]
            cut = max(1, len(ids) // 2)
            if len(ids) > cut:
                probes.append(SequenceInput(id=str(prompt.row_id), prompt_ids=ids[:cut], response_ids=ids[cut:]))
        return probes

    def _summarise(self, stepper: Stepper, books: Books, tracing: Tracing) -> None:
        metrics = {
            "overlap_share": stepper.overlap_share(),
            "training_seconds": stepper.ended - stepper.began,
        }
        self.events.append(
            "summary",
            step=stepper.step,
            policy_version=str(stepper.lineage.version(stepper.step)),
            metrics=metrics,
            ledger=books.ledger.balance(),
            job_trace_id=tracing.job_trace_id,
            time_ended=time.time(),
        )


def _job_trace_id() -> str:
    """The caller's trace, where the environment names one; a malformed one starts a new trace, as the standard asks."""
    try:
        return TraceContext.from_traceparent(os.environ.get("TRACEPARENT", "")).trace_id
    except WireError:
        return new_trace_id()


class _Closer:
    def __init__(self, close: Any) -> None:
        self._close = close

    async def close(self) -> None:
        self._close()


def load_inputs(spec: JobSpec) -> tuple[Tokenizer, PromptSet, list[Prompt], int]:
    """Tokenizer, prompts for training and evaluation, and the number of steps.

    Raises:
        BadInputError: the data cannot be used.
    """
    tokenizer = Tokenizer.load(spec.model.tokenizer or spec.model.path, spec.data.chat_template, model=spec.model.path)
    train = load_prompts(spec.data, spec.data.train_files, tokenizer)
    test = load_prompts(spec.data, spec.data.test_files, tokenizer).prompts if spec.data.test_files else []
    return tokenizer, train, test, spec.steps_for(len(train.prompts))


def steps_sentence(prompts: int, batch: int, steps: int) -> str:
    """How many steps there are, and what becomes of prompts that fill no batch."""
    full, rest = divmod(prompts, batch)
    text = f"{steps} steps of {batch} prompts, {full} full ones an epoch"
    if not rest:
        return text
    unused = -(-steps * batch // prompts) * prompts - steps * batch
    left_out = f", {unused} left out of the last epoch" if unused else ""
    return f"{text} and {rest} carried over into the next{left_out}"
