"""The pipeline of one job: groups are generated and scored while the step before them trains.

Two loops share one state: ``_issue`` starts groups as far as the staleness bound allows, ``_train`` takes whole batches
of ready groups and makes steps of them. Everything that decides is pure (admission, ledger, batch); this module only
waits, calls and notes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.trace import StatusCode

from nightshift.algorithms.staleness import GroupAge, plan_update
from nightshift.config import JobSpec
from nightshift.data import Cursor, Prompt
from nightshift.wire.errors import NightshiftError
from nightshift.wire.events import EventLog
from orchestrator.runner.admission import Admission
from orchestrator.runner.books import Books
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.group import Group, GroupRunner, start_group_span
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.runner.spool import Spool
from orchestrator.runner.stepper import Stepper
from orchestrator.runner.tracing import Tracing


@dataclass
class PipelineState:
    """What both loops see."""

    running: dict[int, Group] = field(default_factory=dict)
    ready: dict[int, Group] = field(default_factory=dict)
    buffered_bytes: int = 0
    #: Groups that ran at the last commit and start again as soon as the staleness bound allows.
    backlog: deque[GroupRecord] = field(default_factory=deque)
    #: Why groups failed since the last one that was scored.
    failed_in_row: list[NightshiftError] = field(default_factory=list)
    #: Groups that had been issued when the first of those failed.
    failing_since: int = 0
    #: Why groups failed since the last step.
    failures: list[NightshiftError] = field(default_factory=list)


class Pipeline:
    """Runs the steps ``stepper.step + 1`` to ``total_steps`` of a job."""

    def __init__(
        self,
        spec: JobSpec,
        total_steps: int,
        *,
        prompts: list[Prompt],
        cursor: Cursor,
        books: Books,
        fleet: Fleet,
        runner: GroupRunner,
        stepper: Stepper,
        spool: Spool,
        tracing: Tracing,
        events: EventLog,
        admission: Admission,
    ) -> None:
        self._spec = spec
        self._total_steps = total_steps
        self._prompts = prompts
        self._cursor = cursor
        self._books = books
        self._fleet = fleet
        self._runner = runner
        self._stepper = stepper
        self._spool = spool
        self._tracing = tracing
        self._events = events
        self._admission = admission
        self._state = PipelineState()
        rollout = spec.rollout
        #: Bytes that a running group may come to: ids, log-probs, reference log-probs and mask of each sample.
        self._most_bytes = rollout.n * (4 * spec.data.max_prompt_length + 13 * rollout.max_response_length)
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        stepper.changed = self._notify
        stepper.failed = self._fail

    @property
    def state(self) -> PipelineState:
        """Groups in flight, for progress views and tests."""
        return self._state

    @property
    def admission(self) -> Admission:
        """The staleness rule, for the metrics."""
        return self._admission

    def stop(self) -> None:
        """Asks for an end after the step in progress."""
        self._stop.set()

    async def run(self, resumed: list[tuple[GroupRecord, Group | None]]) -> bool:
        """Runs to the end; returns False where :meth:`stop` ended it earlier.

        Args:
            resumed: groups that were in flight at the last commit: with their experience, or None to be made again.

        Raises:
            NightshiftError: a role failed for good.
        """
        issue = asyncio.create_task(self._issue(resumed))
        train = asyncio.create_task(self._train())
        stop = asyncio.create_task(self._stop.wait())
        progress = asyncio.create_task(self._report())
        try:
            await asyncio.wait({issue, train, stop}, return_when=asyncio.FIRST_COMPLETED)
            if issue.done() and not train.done() and not self._stop.is_set():
                issue.result()  # issuing never ends by itself: this raises what ended it
            if not train.done():
                # A stop: the update in progress ends, since its answer decides what the checkpoint holds.
                issue.cancel()
                await self._stepper.finish_step(self._spec.trainer.update_timeout_s)
                train.cancel()
                (ended,) = await asyncio.gather(train, return_exceptions=True)
                if isinstance(ended, Exception):
                    raise ended
                return False
            train.result()
            return True
        finally:
            for task in (issue, train, stop, progress, *self._tasks):
                task.cancel()
            await asyncio.gather(issue, train, stop, progress, *self._tasks, return_exceptions=True)

    # Issuing ----------------------------------------------------------------------------------------------------------

    async def _issue(self, resumed: list[tuple[GroupRecord, Group | None]]) -> None:
        for record, group in resumed:
            if group is None:
                self._state.backlog.append(record)
                continue
            self._state.ready[group.index] = group
            self._state.buffered_bytes += group.bytes
        while True:
            starting = [await self._start_next() for _ in range(self._headroom())]
            if starting and self._spec.pipeline.deterministic:
                await self._launch_held(starting)
            else:
                for group in starting:
                    self._launch(group)
            await self._notify()
            await self._wait(lambda: self._headroom() > 0)

    def _headroom(self) -> int:
        ledger, state = self._books.ledger, self._state
        room = self._admission.headroom(ledger.accepted, ledger.running - len(state.backlog))
        free = self._spec.pipeline.buffer_mib * 2**20 - state.buffered_bytes
        fitting = free // self._most_bytes - len(state.running)
        # A full buffer is emptied by the next step alone, which needs its whole batch.
        missing = self._admission.batch - len(state.ready) - len(state.running)
        return min(room, max(fitting, missing, 0))

    async def _start_next(self) -> Group:
        if self._state.backlog:
            return self._start_again(self._state.backlog.popleft())
        epoch, row = self._cursor.next()
        index = self._books.ledger.issued
        span, trace_id = start_group_span(self._tracing, index, self._prompts[row], epoch)
        await self._books.issue(GroupRecord(index=index, row=row, epoch=epoch, trace_id=trace_id))
        return Group(index, self._prompts[row], epoch, trace_id, self._stepper.server_step, span)

    def _start_again(self, record: GroupRecord) -> Group:
        prompt = self._prompts[record.row]
        span, _ = start_group_span(self._tracing, record.index, prompt, record.epoch, record.trace_id)
        return Group(record.index, prompt, record.epoch, record.trace_id, self._stepper.server_step, span)

    async def _launch_held(self, groups: list[Group]) -> None:
        """Starts a whole batch while the servers hold, so that they queue its requests in the order of their ids."""
        async with self._fleet.held():
            for group in groups:
                self._launch(group)
            await self._fleet.wait_sent(len(groups) * self._spec.rollout.n)

    def _launch(self, group: Group) -> None:
        self._state.running[group.index] = group
        task = asyncio.create_task(self._run_group(group))
        self._tasks.add(task)
        task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    async def _run_group(self, group: Group) -> None:
        try:
            await self._runner.run(group)
        except NightshiftError as error:
            group.span.set_status(StatusCode.ERROR, error.message)
            group.span.end()
            await self._books.move(group.index, GroupState.FAILED, reason=str(error))
            del self._state.running[group.index]
            if not self._state.failed_in_row:
                self._state.failing_since = self._books.ledger.issued
            self._state.failed_in_row.append(error)
            self._state.failures.append(error)
            self._events.append("warning", role=error.role or "rollout", message=str(error), trace_id=group.trace_id)
            await self._notify()
            return
        versions = sorted(
            (span.version for s in group.samples for span in s.versions), key=lambda v: int(v.rsplit("/", 1)[-1])
        )
        self._spool.put(group.index, group.samples)
        await self._books.move(
            group.index,
            GroupState.READY,
            oldest_version=versions[0] if versions else "",
            newest_version=versions[-1] if versions else "",
        )
        del self._state.running[group.index]
        group.waiting = self._tracing.child("buffer", group.span)
        self._state.ready[group.index] = group
        self._state.buffered_bytes += group.bytes
        self._state.failed_in_row = []
        await self._notify()

    # Training ---------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        while self._stepper.step < self._total_steps and not self._stop.is_set():
            began = time.time()
            groups = await self._collect()
            if self._stop.is_set():
                break  # an update that began now could not be told from one that was given up
            failures, self._state.failures = self._state.failures, []
            await self._stepper.make_step(groups, waited_since=began, failures=failures)
            for group in groups:
                self._state.buffered_bytes -= group.bytes
            await self._notify()
        await self._stepper.settle()

    async def _collect(self) -> list[Group]:
        """The groups of the next step, oldest first, none of them too old."""
        while True:
            await self._wait(lambda: len(self._state.ready) >= self._admission.batch or self._hopeless())
            if len(self._state.ready) < self._admission.batch:
                raise self._state.failed_in_row[0]
            plan = plan_update(
                self._stepper.step,
                (_age(group) for group in self._state.ready.values()),
                (_age(group) for group in self._state.running.values()),
                batch_size=self._admission.batch,
                max_staleness=self._admission.max_staleness,
                on_stale=self._spec.pipeline.on_stale,
            )
            await self._drop_stale([group.order for group in plan.drop if group.order in self._state.ready])
            if plan.may_update:
                return [self._state.ready.pop(group.order) for group in plan.batch]
            if plan.wait_for:
                # The update would make these too old for any later step: it is held back until one of them is in.
                waited = frozenset(group.order for group in plan.wait_for)
                await self._wait(partial(self._left, waited))

    def _left(self, waited: frozenset[int]) -> bool:
        """Whether one of these groups runs no more, or waiting for it would not help."""
        return self._hopeless() or not waited <= self._state.running.keys()

    async def _drop_stale(self, indices: list[int]) -> None:
        for index in indices:
            group = self._state.ready.pop(index)
            self._state.buffered_bytes -= group.bytes
            await self._books.move(index, GroupState.DROPPED_STALE, reason=f"too old for step {self._stepper.step}")
            self._spool.remove([index])
            if group.waiting is not None:
                group.waiting.end()
            group.span.set_attribute("rl.dropped", "stale")
            group.span.end()
            await self._notify()

    def _hopeless(self) -> bool:
        """Whether waiting would not help: a batch's worth of groups failed in a row, and none that was on its way
        when they began to still runs (groups that are refused fail faster than others are scored).
        """
        state = self._state
        others = any(index < state.failing_since for index in state.running)
        return len(state.failed_in_row) >= max(2, self._admission.batch) and not others

    # Waiting ----------------------------------------------------------------------------------------------------------

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, ready: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or ready())
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException | None) -> None:
        """Ends both loops with an error from a task beside them."""
        self._failure = self._failure or error
        notify = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(notify)
        notify.add_done_callback(self._tasks.discard)

    async def _report(self) -> None:
        """Says what each role is doing, when it changes."""
        last: dict[str, str] = {}
        while True:
            calls = self._runner.calls
            doing = {
                "rollout": f"{self._fleet.running} requests" if self._fleet.running else "idle",
                "reward": f"{calls['reward']} calls" if calls["reward"] else "idle",
                "reference": f"{calls['reference']} calls" if calls["reference"] else "idle",
                "trainer": self._stepper.doing,
                "buffer": f"{len(self._state.ready)} groups ready",
            }
            for role, text in doing.items():
                if last.get(role) != text:
                    self._events.append("activity", role=role, doing=text)
            last = doing
            await asyncio.sleep(1.0)


def _age(group: Group) -> GroupAge:
    return GroupAge(group.oldest_version, group.index)
