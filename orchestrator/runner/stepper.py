"""One optimiser step after the other: advantages, update, publication, push, metrics, checkpoint."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.trace import Span

from nightshift.algorithms.schedule import learning_rate
from nightshift.analysis.spans import Interval, covered, within
from nightshift.config import JobSpec
from nightshift.wire.errors import BadInputError, NightshiftError
from nightshift.wire.events import EventLog
from nightshift.wire.schedule import StepRecord, append_step
from nightshift.wire.scoring import SequenceInput
from nightshift.wire.version import Lineage, PolicyVersion
from orchestrator.runner.admission import Admission
from orchestrator.runner.batch import check_budget, rollout_rows
from orchestrator.runner.books import Books
from orchestrator.runner.busy import BusyClock
from orchestrator.runner.checkpoints import BY_CLOCK, Checkpoints
from orchestrator.runner.commit import Consumed
from orchestrator.runner.critic import Critic
from orchestrator.runner.evaluate import Evaluator
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.group import Group
from orchestrator.runner.rollouts import write_rollouts
from orchestrator.runner.save_clock import SaveClock
from orchestrator.runner.spool import Spool
from orchestrator.runner.step_metrics import rate_metrics, stage_metrics, update_metrics
from orchestrator.runner.tracing import Tracing
from orchestrator.runner.tracking import Tracking
from orchestrator.runner.trainer import Publication, TrainerClient, Updated
from orchestrator.runner.update import StepUpdate, step_record

#: Share of weights that an update must change after rounding to the server's precision. A bfloat16 server was measured
#: at 0.02 to 0.10 while it learned late, a float32 server at 0.99.
_LEAST_CHANGED = 0.2


class Stepper:
    """Makes steps and brings their weights to the servers.

    Attributes:
        step: steps made so far; also the step of the trainer's weights.
        server_step: step of the weights that all usable servers hold.
        doing: what the trainer is doing, in words.
        dropped: groups that were dropped as too old since the last step.

    Args:
        manifest: of the checkpoint that the run goes on from; None: it begins.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        total_steps: int,
        *,
        lineage: Lineage,
        step: int,
        trainer: TrainerClient,
        fleet: Fleet,
        books: Books,
        spool: Spool,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
        tracking: Tracking,
        tracing: Tracing,
        events: EventLog,
        admission: Admission,
        probe: list[SequenceInput],
        cursor_state: Callable[[], dict[str, Any]],
        generating: BusyClock,
        manifest: dict[str, Any] | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.step = step
        self.server_step = step
        self.doing = "idle"
        self.dropped: list[Group] = []
        self.lineage = lineage
        self.training = BusyClock()  # time in which the trainer worked on a step
        self.began = self.ended = 0.0
        self._overlap = 0.0  # seconds since ``began`` in which samples were drawn and the trainer worked at once
        self.filtered = 0  # groups left out since the last step, since they had nothing to teach
        self._generating = generating
        self.changed: Callable[[], Awaitable[None]] | None = None
        self.failed: Callable[[BaseException | None], None] | None = None
        self._spec = spec
        self._critic = critic
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._trainer = trainer
        self._fleet = fleet
        self._books = books
        self._spool = spool
        self._evaluator = evaluator
        self._checkpoints = checkpoints
        self._tracking = tracking
        self._tracing = tracing
        self._events = events
        self._admission = admission
        self._probe = probe
        self._cursor_state = cursor_state
        extra = {"critic": critic is not None, "teacher": spec.needs_teacher}
        self._roles = ["rollout", "reward", "reference", *(role for role, there in extra.items() if there)]
        self._in_step = asyncio.Lock()
        self._after: asyncio.Task[None] | None = None
        self._consumed = Consumed()
        self._open: StepUpdate | None = None
        self._schedule: list[StepRecord] = []  # of the steps since the last commit
        self._committed = step if manifest else None
        self._export_owed = bool(manifest and manifest.get(BY_CLOCK))  # by the checkpoint of this step
        self._save_clock = SaveClock(spec.trainer.save_minutes, time.monotonic())
        #: Updates that had nothing to learn from: they hold no position of the learning rate.
        self._skipped = int(manifest.get("skipped", 0)) if manifest else 0
        self._metrics: dict[str, float] = dict(manifest.get("metrics") or {}) if manifest else {}
        self._last_end = time.time()
        self._rounding_told = False

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last step."""
        return self._metrics

    async def begin(self) -> None:
        """Brings the first weights to the servers and evaluates them."""
        publication = await self._publish()
        if self._critic is not None:
            await self._critic.publish(publication.version)
        await self._push(publication)
        # A commit comes before the metrics and the evaluation of its step: what a crash left out is made up for.
        if self._metrics and self.step not in self._tracking.logged("train"):
            self._log_step(self.step, self._metrics)
        if self._test_due() and self.step not in self._tracking.logged("evaluation"):
            await self._evaluate()
        self.began = self._last_end = time.time()
        self._save_clock = SaveClock(self._spec.trainer.save_minutes, time.monotonic())

    async def add_part(
        self,
        groups: Sequence[Group],
        *,
        final: bool,
        waited_since: float,
        failures: Sequence[NightshiftError] = (),
    ) -> None:
        """Gives groups to the update of the next step; returns when the trainer is free again.

        The groups of a step are trained with its final part, all of them or none. With a staleness bound of 0 the new
        weights are on the servers then, otherwise their push goes on beside the next batch.

        Args:
            groups: that are ready, oldest first.
            final: the batch is complete with them.
            waited_since: when the trainer began to wait for them, unix seconds.
            failures: why groups failed since the part before.

        Raises:
            NightshiftError: a role failed, or too much of the batch is unusable.
        """
        async with self._in_step:
            if self._open is None:
                self._open = self._begin_update()
            update = self._open
            update.waited += time.time() - waited_since
            update.failures += failures
            if not final:
                self.doing = f"part of step {update.step}"
                span = self._span("update_part", update, groups, part=len(update.parts))
                with self.training.work(), self._tracing.within(span) as traceparent:
                    await update.add(groups, final=False, traceparent=traceparent)
                self.doing = "waiting for groups"
                return
            batch = [*update.groups, *groups]
            check_budget(batch, self._spec.rollout.n, self._spec.pipeline.failure_budget, update.failures)
            slept = await self._sleep(update) if self._spec.rollout.sleep_mode else {}
            self.doing = f"update of step {update.step}"
            span = self._span("optimizer_step", update, batch, policy_version=update.new)
            with self.training.work(), self._tracing.within(span) as traceparent:
                updated = await update.add(groups, final=True, traceparent=traceparent)
                await self._books.train([group.index for group in batch], update.step, self.lineage.number)
                self.step += 1
                self._admission.make_step(len(batch))
                self._open = None
                bound = self._admission.max_staleness
                self._consumed.add(self.step, batch, n=self._spec.rollout.n, max_staleness=bound)
                for group in batch:
                    group.end_wait()
                    group.span.set_attributes({"rl.step": self.step, "rl.policy_version": update.new})
                    group.span.end()
            await self._finish(update, updated, slept)

    async def loss_of(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics that a step with these groups alone would report now, less those of its gradient; none is made.

        Raises:
            BadInputError: the servers have the memory that it needs.
            NightshiftError: a role failed.
        """
        if self._spec.rollout.sleep_mode:
            raise BadInputError(
                "a loss without a step needs GPU memory that rollout.sleep_mode leaves to the server until then",
                role="trainer",
                fix="Read the loss after the step, or leave rollout.sleep_mode out",
            )
        async with self._in_step:
            update = self._begin_update()
            span = self._span("loss", update, groups)
            with self.training.work(), self._tracing.within(span) as traceparent:
                return await update.loss_of(groups, traceparent)

    async def _sleep(self, update: StepUpdate) -> dict[str, float]:
        """Has the servers leave their memory to the trainer; the push of the step's weights wakes them."""
        self.doing = f"the servers go to sleep for step {update.step}"
        with self._tracing.within(self._tracing.job_span("sleep", role="rollout", step=update.step)):
            return {"timing/sleep": await self._fleet.sleep()}

    async def _finish(self, update: StepUpdate, updated: Updated, slept: dict[str, float]) -> None:
        """Everything that follows an applied update, until the trainer is free."""
        groups = update.groups
        spans = [group.span for group in groups]
        metrics = self._step_metrics(update, updated) | slept
        self._note_update(update, updated)
        if self._spec.tracking.rollouts:
            with self._tracing.within(self._tracing.job_span("store_rollouts", links=spans, step=self.step)):
                rows = rollout_rows(groups, self.step, update.expect)
                await asyncio.to_thread(write_rollouts, self._run_dir / "rollouts", self.step, rows)
        self.doing = "publishing weights"
        if self._after is not None:
            # The push before this one, and its evaluation, come first.
            with self._tracing.within(
                self._tracing.job_span("await_push", role="trainer", links=spans, step=self.step)
            ):
                await self._after
        with self.training.work():
            publication = await self._publish(groups)
        record = step_record(self._spec, update, updated.stepped, publication.digest)
        append_step(self._run_dir, record)
        self._schedule.append(record)
        metrics |= stage_metrics(update, updated, publication, self._roles)
        self._check_rounding(publication, update, updated)
        self._metrics = metrics
        if self._save_due():
            await self.checkpoint()
        elif self.step < self._total_steps and self._save_clock.due(time.monotonic()):
            await self.checkpoint(by_clock=True)
        self.doing = "waiting for a batch"
        self._after = asyncio.create_task(self._after_update(publication, metrics, self._test_due()))
        self._after.add_done_callback(self._note_failure)
        if self._admission.max_staleness == 0:
            await self._after

    async def settle(self) -> None:
        """Waits for the push and the evaluation that are still running."""
        if self._after is not None:
            await self._after
        self.ended = time.time()

    async def close(self) -> None:
        """Gives up the push and the evaluation that are still running."""
        if self._after is not None:
            self._after.cancel()
            await asyncio.gather(self._after, return_exceptions=True)

    def overlap_share(self) -> float:
        """Share of the time since :meth:`begin` in which samples were drawn and the trainer worked at once."""
        rest = self._both((self._last_end, self.ended)) if self.ended > self._last_end else 0.0
        return (self._overlap + rest) / max(1e-9, self.ended - self.began)

    def _both(self, window: Interval) -> float:
        """Seconds of a time in which samples were drawn and the trainer worked at once."""
        return covered(within(within(self._generating.intervals(), self.training.intervals()), [window]))

    async def finish_step(self, timeout_s: float) -> None:
        """Waits for the step in progress, if any.

        Raises:
            TimeoutError: it did not end in time.
        """
        async with asyncio.timeout(timeout_s):
            async with self._in_step:
                pass
            await self.settle()

    async def checkpoint(self, *, by_clock: bool = False) -> None:
        """Writes a checkpoint of the weights as they are, with everything that a resumed run needs.

        Args:
            by_clock: it is only there to go on from: there is no export, and the next checkpoint takes its place.
        """
        export = str(self._checkpoints.export_dir(self.step)) if self._spec.checkpoint.export and not by_clock else ""
        if self._committed == self.step:
            if self._export_owed and export:
                await self._export(export)
            return
        began = time.monotonic()
        self.doing = f"saving step {self.step}"
        await self._books.flush()
        manifest = {
            "run_id": self.lineage.run,
            "lineage": self.lineage.number,
            "branches": self.lineage.branches,
            "step": self.step,
            "total_steps": self._total_steps,
            "policy_version": str(self.lineage.version(self.step)),
            **self._consumed.fields(self._books.ledger),
            "cursor": self._cursor_state(),
            "skipped": self._skipped,
            "schedule": [record.to_dict() for record in self._schedule],
            "metrics": {name: value for name, value in self._metrics.items() if math.isfinite(value)},
            "job_trace_id": self._tracing.job_trace_id,
            "time": time.time(),
            BY_CLOCK: by_clock,
        }
        span = self._tracing.job_span("checkpoint", step=self.step)
        with self._tracing.within(span) as traceparent:
            if self._critic is not None:
                await self._critic.save(str(self._checkpoints.critic_dir(self.step)), self.step, traceparent)
            await self._trainer.save(
                manifest,
                state_dir=str(self._checkpoints.state_dir(self.step)),
                export_dir=export,
                traceparent=traceparent,
            )
        self._checkpoints.keep_manifest(self.step, manifest)
        self._spool.remove(self._consumed.indices)
        self._consumed.clear()
        self._schedule = []
        self._committed, self._export_owed = self.step, by_clock
        self._save_clock.saved(began, time.monotonic())
        await self._trainer.forget(self._checkpoints.rotate(self._spec.checkpoint.keep))
        self._events.append("checkpoint", step=self.step, path=export or str(self._checkpoints.state_dir(self.step)))

    async def _export(self, folder: str) -> None:
        """Writes the export that a checkpoint of the clock left out: the run ends with this step."""
        with self._tracing.within(self._tracing.job_span("checkpoint", step=self.step)) as traceparent:
            await self._trainer.save({}, state_dir="", export_dir=folder, traceparent=traceparent)
        self._export_owed = False
        self._events.append("checkpoint", step=self.step, path=folder)

    def _begin_update(self) -> StepUpdate:
        expect, new = self.lineage.version(self.step), self.lineage.version(self.step + 1)
        return StepUpdate(
            self._spec,
            self._trainer,
            self._events,
            step=self.step + 1,
            expect=str(expect),
            new=str(new),
            rate=self._rate(self.step - self._skipped, self._spec.trainer.learning_rate),
            critic=self._critic,
            critic_rate=self._rate(self.step, self._critic.learning_rate) if self._critic else 0.0,
        )

    def _rate(self, position: int, peak: float) -> float:
        config = self._spec.trainer
        return learning_rate(
            position,
            peak=peak,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self._total_steps,
        )

    def _span(self, name: str, update: StepUpdate, groups: Sequence[Group], **attributes: Any) -> Span:
        return self._tracing.job_span(
            name,
            role="trainer",
            links=[group.span for group in groups],
            step=update.step,
            groups=[group.group_id for group in groups],
            **attributes,
        )

    def _step_metrics(self, update: StepUpdate, updated: Updated) -> dict[str, float]:
        metrics = update_metrics(update, updated, self.dropped, values=self._critic is not None)
        self.dropped = []
        if self._spec.algorithm.filter_zero_spread:
            metrics["rollout/filtered_groups"], self.filtered = float(self.filtered), 0
        return metrics | self._fleet.take_metrics()

    def _note_update(self, update: StepUpdate, updated: Updated) -> None:
        if not updated.stepped:
            self._skipped += 1
        if not updated.stepped and not update.warming_up:
            self._events.append("warning", role="trainer", message=f"step {update.step} had nothing to learn from")
        ratio = updated.metrics.get("log_ratio/abs_mean", 0.0)
        if update.step == 1 and ratio > self._spec.algorithm.max_log_ratio_warn:
            self._events.append(
                "warning",
                role="trainer",
                message=f"mean |log ratio| between trainer and sampler is {ratio:.3g} in the first step: check that "
                "both use the same precision, temperature and attention",
            )

    async def _publish(self, groups: Sequence[Group] = ()) -> Publication:
        version = str(self.lineage.version(self.step))
        await self._fleet.release()
        span = self._tracing.job_span(
            "publish", role="trainer", links=[group.span for group in groups], policy_version=version
        )
        with self._tracing.within(span) as traceparent:
            return await self._trainer.publish(version, self._probe, traceparent)

    async def _push(self, publication: Publication) -> float:
        span = self._tracing.job_span("push_weights", role="rollout", policy_version=publication.version)
        with self._tracing.within(span):
            pause = await self._fleet.publish(publication)
            if self._spec.rollout.sleep_mode:
                span.set_attribute("rl.wake_seconds", self._fleet.woke_s)
        self.server_step = PolicyVersion.parse(publication.version).step
        return pause

    async def _after_update(self, publication: Publication, metrics: dict[str, float], evaluate: bool) -> None:
        began = time.time()
        metrics["timing/sync"] = await self._push(publication)
        if self._spec.rollout.sleep_mode:
            metrics["timing/wake"] = self._fleet.woke_s
        step = PolicyVersion.parse(publication.version).step
        early = evaluate and self._spec.pipeline.deterministic
        if early:  # its requests must not come between those of the next batch
            await self._evaluate(step)
        self._admission.finish_step()
        if self.changed is not None:
            await self.changed()
        window, self._last_end = (self._last_end, now := time.time()), now
        metrics["timing/push"] = now - began
        metrics |= rate_metrics(metrics, window, self.training.intervals(), self._generating.intervals())
        self._overlap += self._both(window)
        for clock in (self.training, self._generating):
            clock.forget(now)
        self._log_step(step, metrics)
        if evaluate and not early:
            await self._evaluate(step)

    async def _evaluate(self, step: int | None = None) -> None:
        step = self.step if step is None else step
        version = str(self.lineage.version(step))
        self._events.append("activity", role="evaluation", doing=f"step {step}")
        metrics = await self._evaluator.run(step, version)
        self._events.append("activity", role="evaluation", doing="idle")
        self._tracking.log(step, metrics, kind="evaluation")
        self._events.append("evaluation", step=step, policy_version=version, metrics=metrics)

    def _log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._tracking.log(step, metrics)
        self._events.append("step", step=step, steps=self._total_steps, metrics=metrics)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and self.failed is not None:
            self.failed(task.exception())

    def _check_rounding(self, publication: Publication, update: StepUpdate, updated: Updated) -> None:
        share, meant = publication.changed_fraction, updated.stepped and update.learning_rate > 0
        if meant and share < _LEAST_CHANGED and not self._rounding_told:
            self._rounding_told = True
            self._events.append(
                "warning",
                role="rollout",
                message=f"only {share:.1%} of the weights change for the {self._spec.rollout.dtype} server at step "
                f"{self.step}: most of the update is lost in rounding, so that learning starts late. A float32 server "
                "(rollout.dtype) or a larger trainer.learning_rate avoids it; the metric is sync/changed_fraction",
            )

    def _save_due(self) -> bool:
        frequency = self._spec.trainer.save_freq
        return bool(frequency) and self.step % frequency == 0 and self.step < self._total_steps

    def _test_due(self) -> bool:
        frequency = self._spec.trainer.test_freq
        due = bool(frequency) and self.step % frequency == 0
        return self._evaluator.enabled and (due or self.step in (0, self._total_steps))
