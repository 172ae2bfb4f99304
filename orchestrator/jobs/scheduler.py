"""Starts waiting jobs, follows their processes and takes over those of an orchestrator that is gone.

One thread; everything that it decides with is in the database and in the run folders, so that another orchestrator can
go on from there at any moment.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from nightshift.cli.runs import EVENTS, JOB
from nightshift.cli.tail import Tail, last_lines
from nightshift.cli.view import RunView
from nightshift.wire.errors import NightshiftError
from nightshift.wire.events import EventLog
from orchestrator.jobs import process
from orchestrator.jobs.lending import Lender
from orchestrator.jobs.process import Identity
from orchestrator.jobs.queue import choose
from orchestrator.jobs.states import Happening, JobState, Status, Wish, happening, observe, progressed
from orchestrator.store.access import AccessStore
from orchestrator.store.jobs import JobRecord, JobStore, LeaseLostError, UnknownJobError
from orchestrator.store.state import FENCE_VARIABLE, FencedError, StateStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How jobs are run. Times in seconds.

    Attributes:
        owner: this orchestrator, unlike any other.
        replaces: beginning of the names of orchestrators that are known to be gone.
        command: of a job's process, with ``{job}`` and ``{folder}`` for its file and folder.
        at_once: most jobs with a process at one time.
        lease_s: how long an orchestrator that went silent keeps its jobs.
        interrupt_s: how long a job may take to leave a checkpoint before it is told to end at once.
        kill_s: how long after that until it is killed.
        first_word_s: how long a process may take to say that it was started.
        ledger_url: database of the runs' ledgers; empty: one file in each run's folder.
    """

    owner: str
    command: Sequence[str]
    replaces: str = ""
    at_once: int = 1
    tick_s: float = 0.5
    lease_s: float = 15.0
    interrupt_s: float = 330.0
    kill_s: float = 90.0
    first_word_s: float = 10.0
    ledger_url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Driven:
    """A job that this orchestrator drives."""

    record: JobRecord
    token: int
    identity: Identity
    tail: Tail
    view: RunView
    popen: subprocess.Popen[bytes] | None = None
    told: int = 0  # interrupts that were sent
    told_at: float = 0.0
    renewed: float = 0.0
    taken: float | None = None  # when it was taken over from another orchestrator


class Scheduler:
    """Drives jobs. :meth:`start` and :meth:`stop` it, and :meth:`wake` it when there may be something to do."""

    def __init__(
        self,
        jobs: JobStore,
        access: AccessStore,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        lender: Lender | None = None,
    ) -> None:
        self._jobs = jobs
        self._access = access
        self._config = config
        self._clock = clock
        self._lender = lender
        self._driven: dict[str, _Driven] = {}
        self._wake = threading.Event()
        self._stop = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._away_since: float | None = None

    @property
    def driven(self) -> list[str]:
        """Jobs that have a process which this orchestrator follows."""
        return list(self._driven)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Looks at once instead of at the next tick."""
        self._wake.set()

    @property
    def draining(self) -> bool:
        """Whether it starts no more jobs, since it is to end."""
        return self._draining

    def drain(self, timeout_s: float) -> list[str]:
        """Has all jobs leave a checkpoint and end, and waits for them; the next orchestrator goes on with them.

        Returns:
            Jobs whose process still runs after ``timeout_s``.
        """
        self._draining = True
        self._wake.set()
        deadline = self._clock() + timeout_s
        while self._driven and self._clock() < deadline:
            time.sleep(0.05)
        return self.driven

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the thread; jobs go on, and their leases are given back."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._lender is not None:
            self._lender.close()
        for driven in self._driven.values():
            try:
                self._jobs.release(driven.record.id, driven.token)
            except SQLAlchemyError:
                _log.warning("the lease of %s could not be given back: it runs out by itself", driven.record.id)

    def _run(self) -> None:
        while not self._stop:
            try:
                self.tick()
                self._away_since = None
            except SQLAlchemyError as error:
                if self._away_since is None:
                    self._away_since = self._clock()
                    _log.warning("the database is away; running jobs go on: %s", str(error).splitlines()[0])
            self._wake.wait(self._config.tick_s)
            self._wake.clear()

    def tick(self) -> None:
        """One look at everything."""
        for driven in list(self._driven.values()):
            self._apart(f"job {driven.record.id}", partial(self._follow, driven))
        if self._draining:
            return
        self._apart("jobs of an orchestrator that is gone", self._take_over)
        self._apart("waiting jobs", self._start_waiting)
        if self._lender is not None:
            self._apart("fleets", self._lender.tick)

    def _apart(self, what: str, work: Callable[[], None]) -> None:
        """Does a part of a look, so that its failure keeps no other part from being done.

        Raises:
            SQLAlchemyError: the database is away, which concerns all of them.
        """
        try:
            work()
        except SQLAlchemyError:
            raise
        except Exception:
            _log.exception("%s: an error that was not foreseen; the next look tries again", what)

    # Jobs of an orchestrator that is gone -----------------------------------------------------------------------------

    def _take_over(self) -> None:
        for record in self._jobs.active():
            if record.id in self._driven:
                continue
            token = self._jobs.acquire(
                record.id, self._config.owner, self._config.lease_s, replaces=self._config.replaces
            )
            if token is None:
                continue
            run_dir = Path(record.run_dir)
            identity = process.read_identity(run_dir) or Identity(0, 0, "", 0)
            _log.info("takes over job %s (%s)", record.id, "running" if identity.alive else "its process is gone")
            driven = _Driven(record, token, identity, Tail(run_dir / EVENTS, from_start=True), RunView())
            driven.renewed = driven.taken = self._clock()
            self._driven[record.id] = driven
            self._follow(driven)

    # Starting ---------------------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        waiting = self._jobs.waiting()
        if not waiting:
            return
        running = [record.project for record in self._jobs.active()]
        quotas = {project.name: project.max_running for project in self._access.projects()}
        for job_id in choose(waiting, running, at_once=self._config.at_once, quotas=quotas):
            if self._stop or self._draining:
                return
            token = self._jobs.acquire(job_id, self._config.owner, self._config.lease_s, replaces=self._config.replaces)
            if token is not None:
                self._launch(job_id, token)

    def _launch(self, job_id: str, token: int) -> None:
        try:
            # Before the state changes: what an earlier process left must not be read as the end of the new one.
            process.forget(Path(self._jobs.get(job_id).run_dir))
            record = self._jobs.change(
                job_id, lambda status: observe(status, Happening.LAUNCHED), token=token, started=time.time()
            )
        except NightshiftError as error:  # cancelled or deleted a moment ago
            _log.info("job %s does not start: %s", job_id, error)
            self._jobs.release(job_id, token)
            return
        run_dir = Path(record.run_dir)
        tail = Tail(run_dir / EVENTS)
        try:
            self._raise_fence(record, token)
            say(record)
            popen = process.start(run_dir, self._command(run_dir), token, self._environment(record, token))
        except (OSError, FencedError) as error:
            self._end(record, token, Happening.FAILED, None, f"[orchestrator] the job cannot be started: {error}")
            return
        driven = _Driven(record, token, process.identity(token, popen.pid), tail, RunView(), popen)
        driven.renewed = self._clock()
        self._driven[job_id] = driven
        _log.info("started job %s", job_id)

    def _raise_fence(self, record: JobRecord, token: int) -> None:
        store = StateStore(self.ledger_url(record), fence=token)
        try:
            store.raise_fence(record.id, token)
        finally:
            store.close()

    def ledger_url(self, record: JobRecord) -> str:
        """The database that holds the run's ledger."""
        return self._config.ledger_url or f"sqlite:///{Path(record.run_dir) / 'state.db'}"

    def _command(self, run_dir: Path) -> list[str]:
        places = {"{job}": str(run_dir / JOB), "{folder}": str(run_dir)}
        return [places.get(part, part) for part in self._config.command]

    def _environment(self, record: JobRecord, token: int) -> dict[str, str]:
        values = {**os.environ, **self._config.environment, FENCE_VARIABLE: str(token)}
        if self._config.ledger_url:
            values["NIGHTSHIFT_DATABASE_URL"] = self._config.ledger_url
        values.pop("TRACEPARENT", None)
        if record.traceparent:
            values["TRACEPARENT"] = record.traceparent
        return values

    # Following --------------------------------------------------------------------------------------------------------

    def _follow(self, driven: _Driven) -> None:
        record, config = driven.record, self._config
        if self._clock() - driven.renewed > config.lease_s / 3:
            if not self._jobs.renew(record.id, driven.token, config.lease_s):
                _log.warning("job %s is driven by another orchestrator now", record.id)
                del self._driven[record.id]
                return
            driven.renewed = self._clock()
        if driven.identity.pid == 0 and driven.taken is not None:
            # Its orchestrator may have gone between the start of the process and the process's first word.
            driven.identity = process.read_identity(Path(record.run_dir)) or driven.identity
            if driven.identity.pid == 0 and self._clock() - driven.taken < config.first_word_s:
                return
        alive = driven.identity.alive  # asked before the events are read, so that the last of them are not missed
        if driven.popen is not None and driven.popen.poll() is not None:
            alive = False
        works, stepped = self._read_events(driven)
        try:
            current = self._note(driven, works, stepped)
            if current.lease_token != driven.token:
                raise LeaseLostError(f"job {record.id} is driven by {current.lease_owner}", role="orchestrator")
            if alive:
                self._ask_to_end(driven, current)
                return
            code = process.exit_code(Path(record.run_dir), driven.identity.token)
            what = happening(code)
            self._end(current, driven.token, what, code, self._why(driven, what, code))
        except (LeaseLostError, UnknownJobError) as error:
            _log.warning("%s", error)
        del self._driven[record.id]

    def _read_events(self, driven: _Driven) -> tuple[bool, bool]:
        """Reads what the run has said since; whether it said that it works, and whether it made a step."""
        works = stepped = False
        for event in driven.tail.read():
            driven.view.apply(event)
            works = works or (event.get("kind") == "job" and event.get("state") == "running")
            stepped = stepped or event.get("kind") == "step"
        return works, stepped

    def _note(self, driven: _Driven, works: bool, stepped: bool) -> JobRecord:
        job_id, token, view = driven.record.id, driven.token, driven.view
        if stepped:
            self._jobs.progress(job_id, token, view.step, view.steps)
        if works or stepped:
            before = self._jobs.get(job_id).state

            def rule(status: Status) -> Status:
                status = progressed(status) if stepped else status
                return observe(status, Happening.WORKS)

            record = self._jobs.change(job_id, rule, token=token)
            if record.state is not before:
                say(record)
            return record
        return self._jobs.get(job_id)

    def _ask_to_end(self, driven: _Driven, record: JobRecord) -> None:
        asked = record.state is JobState.CANCELLING or record.status.wish is Wish.PAUSE
        if not asked and not self._draining:
            return
        now = self._clock()
        if driven.told == 0 or (driven.told == 1 and now - driven.told_at > self._config.interrupt_s):
            driven.told += 1
            driven.told_at = now
            driven.identity.signal(signal.SIGINT)
        elif driven.told > 1 and now - driven.told_at > self._config.kill_s:
            driven.identity.kill()

    def _why(self, driven: _Driven, what: Happening, code: int | None) -> str:
        if what is Happening.FAILED:
            return driven.view.failure or self._last_words(driven) or f"[job] its process ended with code {code}"
        if what is Happening.VANISHED:
            return "[job] its process vanished before it had finished a step"
        return ""

    def _last_words(self, driven: _Driven) -> str:
        """The error line that the command ended with, before there were events."""
        lines = last_lines(Path(driven.record.run_dir) / "logs" / "job.log", 40)
        at = next((number for number in reversed(range(len(lines))) if lines[number].startswith("error: ")), None)
        return "\n".join(lines[at:]).removeprefix("error: ") if at is not None else ""

    def _end(self, record: JobRecord, token: int, what: Happening, code: int | None, error: str) -> None:
        # With the state, where it is foreseen: who waits for the end of a job reads the cause at once.
        fails = error and observe(record.status, what).state is JobState.FAILED
        why = {"error": error[:4000]} if fails else {}
        after = self._jobs.change(record.id, lambda status: observe(status, what), token=token, exit_code=code, **why)
        if after.state is JobState.FAILED and error and not after.error:
            after = self._jobs.change(record.id, lambda status: status, token=token, error=error[:4000])
        _log.info("job %s: %s", record.id, after.state)
        say(after)
        self._jobs.release(record.id, token)


def say(record: JobRecord, **more: object) -> None:
    """Writes a job's state into its stream of events; a full disk does not stop the job's management."""
    try:
        with EventLog(Path(record.run_dir) / EVENTS, record.id) as events:
            detail = {"error": record.error} if record.error else {}
            events.append("state", state=str(record.state), wish=str(record.status.wish), **detail, **more)
    except OSError as error:
        _log.warning("job %s: its state could not be written to its events: %s", record.id, error)
