"""The pipeline of one job: groups are generated and scored while the step before them trains.

Two loops share one state: ``_issue`` starts groups as far as the staleness bound allows, ``_train`` makes steps of the
ready ones. With ``pipeline.streaming`` an update begins with the groups that are there, and the others follow in
further parts; otherwise it waits for its whole batch. Everything that decides is pure (admission, staleness, ledger,
batch); this module only waits, calls and notes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from opentelemetry.trace import StatusCode

from nightshift.algorithms import needs_whole_batch
from nightshift.algorithms.staleness import PartPlan, left_behind, plan_part
from nightshift.config import JobSpec
from nightshift.data import Cursor, Prompt
from nightshift.wire.errors import NightshiftError, RoleError
from nightshift.wire.events import EventLog
from nightshift.wire.version import PolicyVersion
from orchestrator.runner.admission import Admission
from orchestrator.runner.batch import whole_passes
from orchestrator.runner.books import Books
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.group import Group, GroupRunner, start_group_span
from orchestrator.runner.in_flight import PipelineState
from orchestrator.runner.ledger import IN_FLIGHT, GroupRecord, GroupState
from orchestrator.runner.live import LiveSettings
from orchestrator.runner.shaping import teaches
from orchestrator.runner.spool import Spool
from orchestrator.runner.stepper import Stepper
from orchestrator.runner.tracing import Tracing

#: Groups that start together: one transaction for all of them, and not so many that the first waits long.
_TOGETHER = 256


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
        self._most_bytes = spec.group_bytes
        pipeline = spec.pipeline
        # A part of an update needs the memory of servers that still draw the rest, where they take turns.
        alone = pipeline.deterministic or spec.rollout.sleep_mode
        self._streaming = pipeline.streaming and not alone and not needs_whole_batch(spec.algorithm)
        #: Samples of one pass of the trainer over all its ranks: less is not sent unless it completes the batch.
        self._pass_samples = spec.trainer.micro_batch_size * spec.trainer.ranks
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        #: Settings that change while the run goes on; None: none do.
        self.live: LiveSettings | None = None
        #: Groups that are being entered in the ledger, and are launched next.
        self._starting = 0
        stepper.changed = self._notify
        stepper.failed = self._fail
        fleet.on_room = self._notify
        runner.drawn = self._drawn

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
            self._state.put(group)
        while True:
            count = self._headroom()
            if self._spec.pipeline.deterministic:
                self._starting = count
                if starting := await self._start(count):
                    await self._launch_held(starting)
            else:
                self._starting = min(count, _TOGETHER)
                for group in await self._start(self._starting):
                    self._launch(group)
            self._starting = 0
            await self._notify()
            await self._wait(lambda: self._headroom() > 0)

    def _headroom(self) -> int:
        ledger, state = self._books.ledger, self._state
        room = self._admission.headroom(ledger.accepted, ledger.running - len(state.backlog))
        free = self._spec.pipeline.buffer_mib * 2**20 - state.buffered_bytes
        fitting = free // self._most_bytes - len(state.running)
        if (wanted := self._fleet.room(len(state.running) - self._runner.scoring)) is not None:
            fitting = min(fitting, wanted)
        # A full buffer is emptied by the next step alone, which needs its whole batch, however full the servers are:
        # what a resumed run brought along must not stand in its way.
        given = len(state.open) if len(state.open) < self._admission.batch else 0
        in_flight = given + len(state.ready) + len(state.running)
        missing = self._admission.batch - in_flight
        if self.live is not None:
            room = self.live.limit(room, in_flight, self._admission.batch)
        return min(room, max(fitting, missing, 0))

    async def _start(self, count: int) -> list[Group]:
        """The next groups, entered in the ledger."""
        await self._books.opened()  # a commit must not find the cursor ahead of the groups that were issued
        backlog = self._state.backlog
        again = [self._start_again(backlog.popleft()) for _ in range(min(count, len(backlog)))]
        records, spans, first = [], [], self._books.ledger.issued
        for index in range(first, first + count - len(again)):
            epoch, row = self._cursor.next()
            span, trace_id = start_group_span(self._tracing, index, self._prompts[row], epoch)
            records.append(GroupRecord(index, row, epoch, trace_id))
            spans.append((span, self._tracing.child("issue", span)))
        if records:
            await self._books.issue(*records)
        version = self._stepper.server_step
        new = (
            Group(record.index, self._prompts[record.row], record.epoch, record.trace_id, version, *both)
            for record, both in zip(records, spans, strict=True)
        )
        return [*again, *new]

    def _start_again(self, record: GroupRecord) -> Group:
        prompt = self._prompts[record.row]
        span, _ = start_group_span(self._tracing, record.index, prompt, record.epoch, record.trace_id)
        issue = self._tracing.child("issue", span)
        return Group(record.index, prompt, record.epoch, record.trace_id, self._stepper.server_step, span, issue)

    async def _launch_held(self, groups: list[Group]) -> None:
        """Starts a whole batch while the servers hold, so that they queue its requests in the order of their ids."""
        async with self._fleet.held():
            for group in groups:
                self._launch(group)
            await self._fleet.wait_sent(len(groups) * self._spec.rollout.n)

    def _launch(self, group: Group) -> None:
        self._state.start(group)
        task = asyncio.create_task(self._run_group(group))
        self._tasks.add(task)
        self._group_tasks[group.index] = task
        task.add_done_callback(lambda _: self._group_tasks.pop(group.index, None))
        task.add_done_callback(self._group_done)

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    async def _run_group(self, group: Group) -> None:
        group.end_wait()
        try:
            await self._runner.run(group)
        except NightshiftError as error:
            group.span.set_status(StatusCode.ERROR, error.message)
            group.span.end()
            await self._books.move(group.index, GroupState.FAILED, reason=str(error))
            self._state.end(group.index)
            if not self._state.failed_in_row:
                self._state.failing_since = self._books.ledger.issued
            self._state.failed_in_row.append(error)
            self._state.failures.append(error)
            self._events.append("warning", role=error.role or "rollout", message=str(error), trace_id=group.trace_id)
            await self._notify()
            return
        if not teaches(group.samples, self._spec):
            await self._filter(group)
            return
        self._state.filtered_in_row = 0
        with self._tracing.within(self._tracing.child("keep", group.span)):
            self._spool.put(group.index, group.samples)
            versions = sorted(group.versions, key=lambda version: PolicyVersion.parse(version).step)
            await self._books.move(
                group.index,
                GroupState.READY,
                oldest_version=versions[0] if versions else "",
                newest_version=versions[-1] if versions else "",
            )
        self._state.end(group.index)
        group.waiting = self._tracing.child("buffer", group.span)
        self._state.put(group)
        self._state.failed_in_row = []
        await self._notify()

    async def _filter(self, group: Group) -> None:
        """Leaves out a group that has nothing to teach; admission lets another one start in its place.

        Raises:
            RoleError: too many in a row.
        """
        await self._books.move(group.index, GroupState.DROPPED_FILTERED, reason="all rewards are equal")
        self._state.end(group.index)
        group.span.set_attribute("rl.dropped", "filtered")
        group.span.end()
        self._state.failed_in_row = []
        self._state.filtered_in_row += 1
        self._stepper.filtered += 1
        limit = self._spec.algorithm.filter_limit * self._admission.batch
        if self._state.filtered_in_row >= limit:
            raise RoleError(
                f"all rewards were equal in each of the last {limit} prompt groups, so that none could be trained on",
                role="reward",
                fix="Take prompts that are sometimes answered right, raise rollout.n or algorithm.filter_limit, or set "
                "algorithm.filter_zero_spread to false",
            )
        await self._notify()

    # Training ---------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        while self._stepper.step < self._total_steps and not self._stop.is_set():
            if self.live is not None:
                in_flight = len(self._state.ready) + len(self._state.running) + self._starting
                if await self.live.boundary(self._stepper.step, in_flight, self._admission, self._stepper.checkpoint):
                    await self._notify()
            if not await self._make_step():
                break
        await self._stepper.settle()

    async def _make_step(self) -> bool:
        """Makes one step; returns False where a stop came before its last part."""
        state, batch = self._state, self._admission.batch
        while True:
            began = time.time()
            groups = await self._collect(batch)
            if self._stop.is_set():
                return False  # an update that ended now could not be told from one that was given up
            final = len(state.open) == batch
            if final:
                await self._drop(self._left_behind(batch))
            failures, state.failures = state.failures, []
            await self._stepper.add_part(groups, final=final, waited_since=began, failures=failures)
            if final:
                state.close()
                await self._notify()
                return True

    async def _collect(self, batch: int) -> list[Group]:
        """The groups of the next part, oldest first, none of them too old; they are in ``state.open`` then.

        Args:
            batch: groups of the step in progress.

        Raises:
            NightshiftError: so many groups failed in a row that there will be none.
        """
        state = self._state
        while True:
            places = batch - len(state.open)
            await self._wait(lambda: self._enough(places) or self._hopeless())  # noqa: B023
            plan = self._plan(places, batch)
            running = state.running.items() if plan.late else ()
            late = [index for index, group in running if group.started_version in plan.late]
            gone = [*(age.order for age in plan.drop), *late]
            await self._drop(gone)
            take = plan.take
            if len(take) < places:
                sizes = [len(state.ready[age.order].samples) for age in take]
                take = take[: whole_passes(sizes, self._pass_samples) if self._streaming else 0]
            if take:
                return state.open_with(take)
            if self._hopeless():
                raise state.failed_in_row[0]
            if not gone:  # else others may have come in meanwhile, of which the plan knows nothing
                await self._wait_behind(plan, places)

    def _enough(self, places: int) -> bool:
        """Whether there may be a part: what is ready completes the batch, or fills a pass of the trainer."""
        ready = len(self._state.ready)
        return ready >= places or (self._streaming and ready * self._spec.rollout.n >= self._pass_samples)

    def _plan(self, places: int, batch: int) -> PartPlan:
        return plan_part(
            self._stepper.step,
            self._state.ready_ages(),
            self._state.versions,
            places=places,
            batch_size=batch,
            max_staleness=self._admission.max_staleness,
            on_stale=self._spec.pipeline.on_stale,
        )

    async def _wait_behind(self, plan: PartPlan, places: int) -> None:
        """Waits until a plan that gave no part may give one. A plan costs what is ready: it is not made at each end."""
        state, ready = self._state, len(self._state.ready)
        if plan.held_by is None:
            await self._wait(lambda: len(state.ready) != ready or self._hopeless())
            return
        # Taking more would make these too old for any later step: the update is held back until one of them is in.
        held_by = plan.held_by
        missing = 1 if self._streaming else places - len(plan.take)
        left = max(0, state.running_up_to(held_by) - missing)
        await self._wait(lambda: state.running_up_to(held_by) <= left or self._hopeless())

    def _left_behind(self, batch: int) -> list[int]:
        """Groups that the step in progress, which is complete, leaves too old for any later one."""
        gone = left_behind(
            self._stepper.step,
            self._state.all_ages(),
            batch_size=batch,
            max_staleness=self._admission.max_staleness,
            on_stale=self._spec.pipeline.on_stale,
        )
        return [age.order for age in gone]

    async def _drop(self, indices: Iterable[int]) -> None:
        """Ends groups that are too old: what is ready is forgotten, what runs is cancelled, requests and all."""
        for index in indices:
            task = self._group_tasks.get(index)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if index in self._state.ready:
                group = self._state.remove(index)
            elif index in self._state.running:
                group = self._state.end(index)
            if self._books.ledger.records[index].state not in IN_FLIGHT:
                continue  # it failed meanwhile
            await self._books.move(index, GroupState.DROPPED_STALE, reason=f"too old for step {self._stepper.step + 1}")
            self._spool.remove([index])
            self._stepper.dropped.append(group)
            group.end_wait()
            group.span.set_attribute("rl.dropped", "stale")
            group.span.end()
            await self._notify()

    def _hopeless(self) -> bool:
        """Whether waiting would not help: a batch's worth of groups failed in a row, and none that was on its way
        when they began to still runs (groups that are refused fail faster than others are scored).
        """
        state = self._state
        if len(state.failed_in_row) < max(2, self._admission.batch):
            return False  # asked at each event: what runs is only looked through when it matters
        return not any(index < state.failing_since for index in state.running)

    # Waiting ----------------------------------------------------------------------------------------------------------

    async def _drawn(self) -> None:
        """A group is drawn: where the servers' load is what holds others back, the next one may start."""
        if self._fleet.room(0) is not None:
            await self._notify()

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
                "trainer": self._stepper.doing,
                "buffer": f"{len(self._state.ready)} groups ready",
            }
            for role in self._runner.models:  # reference, teacher and critic, as the job has them
                doing[role] = f"{calls[role]} calls" if calls[role] else "idle"
            for role, text in doing.items():
                if last.get(role) != text:
                    self._events.append("activity", role=role, doing=text)
            last = doing
            await asyncio.sleep(1.0)
