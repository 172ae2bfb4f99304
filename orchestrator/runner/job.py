"""One job in its folder: attempts at its run, each from the newest checkpoint, until one comes to an end."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.trace import Tracer

from nightshift.config import JobSpec
from nightshift.config.load import read_resolved
from nightshift.wire import telemetry
from nightshift.wire.diagnose import translate
from nightshift.wire.errors import NightshiftError
from nightshift.wire.events import EventLog
from nightshift.wire.trace import TraceContext, new_span_id
from orchestrator.api.otlp import TraceReceiver
from orchestrator.runner.attempt import Attempt
from orchestrator.runner.books import Books, patiently
from orchestrator.runner.checkpoints import Checkpoints
from orchestrator.runner.exporter import Exporter
from orchestrator.runner.inputs import Inputs, load_inputs
from orchestrator.runner.ledger import Ledger
from orchestrator.runner.pipeline import Pipeline
from orchestrator.runner.preference import PreferenceAttempt, PreferenceInputs
from orchestrator.runner.services import TrainerAddress, wait_for_services
from orchestrator.runner.start import Start, find_start
from orchestrator.runner.tracing import Tracing, run_tracer
from orchestrator.runner.trainer import TrainerLostError
from orchestrator.store.state import StateStore

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Losses:
    """Losses of the trainer since the run got further than it ever was. Pure.

    Attributes:
        limit: after so many, the run's next step itself is to blame, and another attempt would not help.
        trainer: the one that was lost last.
    """

    limit: int = 3
    count: int = 0
    furthest: int = -1
    trainer: TrainerAddress | None = None

    def note(self, trainer: TrainerAddress, step: int) -> None:
        """Takes note that a trainer was lost after ``step`` steps were made."""
        self.count = 1 if step > self.furthest else self.count + 1
        self.furthest, self.trainer = max(self.furthest, step), trainer

    @property
    def hopeless(self) -> bool:
        """Whether to give up."""
        return self.count >= self.limit


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
        self._attempt: Attempt | PreferenceAttempt | None = None
        self._main: asyncio.Task[bool] | None = None
        self._stopping = False

    def stop(self) -> None:
        """Asks for a checkpoint and an end; called by signals."""
        self._stopping = True
        if (self._attempt is None or not self._attempt.stop()) and self._main is not None:
            self._main.cancel()

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, while there is one."""
        return self._attempt.pipeline if self._attempt else None

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
            self.events.append(
                "job", state=state, error=str(translate(error, role="orchestrator")), role="orchestrator"
            )
            return 1

    async def _run(self, resume: bool) -> bool:
        spec = self.spec
        exporter = Exporter(spec, self.run_dir, self.events)
        receiver = TraceReceiver(exporter.on_span, spec.tracking.otlp_endpoint)
        await receiver.start(self._otlp_port, spec.resources.otlp_host)
        try:
            exporter.start()
            inputs = PreferenceInputs(spec) if spec.is_preference else load_inputs(spec)
            for message in inputs.train.warnings:
                self.events.append("warning", role="job", message=message)
            tracer = run_tracer(self.run_id, exporter.on_span, spec.tracking.otlp_endpoint)
            losses = Losses()
            while True:
                try:
                    return await self._once(inputs, tracer, exporter, losses, resume=resume or losses.count > 0)
                except TrainerLostError as error:
                    if self._stopping or losses.hopeless:
                        raise
                    self.events.append("warning", role="trainer", message=f"{error}; going on from the last checkpoint")
        finally:
            await asyncio.to_thread(telemetry.shutdown)
            await receiver.stop()
            exporter.close()

    async def _open_database(self, checkpoints: Checkpoints, *, resume: bool) -> tuple[StateStore, Start]:
        url = os.environ.get("NIGHTSHIFT_DATABASE_URL") or f"sqlite:///{self.run_dir / 'state.db'}"

        def look() -> tuple[StateStore, Start]:
            store = StateStore(url)
            try:
                return store, find_start(self.run_id, store, checkpoints, self.events, resume=resume)
            except BaseException:
                store.close()
                raise

        return await patiently(lambda: asyncio.to_thread(look), self.events, self.spec.pipeline.role_timeout_s)

    async def _once(
        self, inputs: Inputs | PreferenceInputs, tracer: Tracer, exporter: Exporter, losses: Losses, *, resume: bool
    ) -> bool:
        """An attempt from the newest checkpoint on; notes in ``losses`` where it lost its trainer."""
        spec, checkpoints = self.spec, Checkpoints(self.run_dir)
        store, start = await self._open_database(checkpoints, resume=resume)
        books = Books(store, self.run_id, Ledger.of(start.records), self.events, spec.pipeline.role_timeout_s)
        tracing = Tracing(tracer, TraceContext(start.job_trace_id, new_span_id(), True))
        exporter.sampler.keep(start.job_trace_id)
        given = (books, checkpoints, tracing)
        attempt: Attempt | PreferenceAttempt
        if isinstance(inputs, PreferenceInputs):
            attempt = PreferenceAttempt(spec, self.run_dir, self.events, inputs, start, *given)
        else:
            attempt = Attempt(spec, self.run_dir, self.events, inputs, start, *given, exporter)
        self._attempt = attempt
        try:
            await books.save_run(start.lineage, start.job_trace_id, "running")
            timeout = spec.rollout.start_timeout_s + spec.scorers.start_timeout_s + spec.trainer.start_timeout_s
            services, trainer = await wait_for_services(self.run_dir, timeout, losses.trainer)
            try:
                finished = await attempt.run(services, trainer)
            except TrainerLostError:
                losses.note(trainer, attempt.step)
                raise
            await books.save_run(start.lineage, start.job_trace_id, "succeeded" if finished else "interrupted")
            return finished
        finally:
            tracing.end()
            await attempt.close()
            books.close()
