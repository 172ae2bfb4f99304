"""``nightshift run``: starts what the job needs, shows progress, leaves nothing running."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from nightshift.cli import prepare, processes
from nightshift.cli.data import check_data
from nightshift.cli.memory import PeakMemory, roles_below, sample
from nightshift.cli.output import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, fail, print_json
from nightshift.cli.ports import HOST, check_ports, free_port
from nightshift.cli.processes import Child
from nightshift.cli.progress import Progress, progress_for
from nightshift.cli.report import report, report_lines
from nightshift.cli.runs import EVENTS, JOB, SERVICES, checkpoints, find_run, hold, make_run, new_run_id
from nightshift.cli.shared_memory import Segments
from nightshift.cli.tail import Tail, last_lines
from nightshift.cli.view import RunView, role_sentence
from nightshift.compat.loading import load_any
from nightshift.config import JobSpec
from nightshift.config.load import read_resolved, write_resolved
from nightshift.config.site import with_site
from nightshift.restarts import RestartPolicy
from nightshift.wire.errors import BadInputError
from nightshift.wire.events import EventLog, read_events

_POLL_S = 0.1
#: The job service sets it for the jobs that it runs.
_SERVICE_VARIABLE = "NIGHTSHIFT_FENCE"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each part of the end may take, in seconds."""

    interrupt: float = 300.0  # the runner finishes what it is at and saves a checkpoint
    runner: float = 30.0  # the runner, told to end because the agent failed
    agent: float = 90.0  # the agent ends vLLM, Serve and Ray
    sweep: float = 20.0


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP: the first asks for an orderly end, the second for the end at once."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def asked(self) -> bool:
        """Whether the run is to end with a checkpoint."""
        return self.count > 0

    @property
    def hard(self) -> bool:
        """Whether everything is to end now."""
        return self.count > 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catches the signals within."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_job(
    job: Path,
    overrides: Sequence[str],
    *,
    resume: str | None = None,
    run_dir: Path | None = None,
    as_json: bool = False,
) -> int:
    """Runs a job to its end.

    Returns:
        The exit code: 0 done, 1 failed, 2 bad input, 130 interrupted.

    Raises:
        NightshiftError: something is wrong before anything was started.
    """
    console = Console()

    def say(text: str) -> None:
        if as_json:
            print_json({"time": time.time(), "kind": "message", "message": text})
        else:
            console.out(text, highlight=False)

    spec = with_site(load_any(job, overrides, say))
    prepare.check_installation()
    prepare.check_weight_store(spec)
    check_ports(spec)
    _check_fleet(spec)
    previous = _resumable(resume, spec) if resume is not None else None
    prepare.resolve_models(spec, say)
    prepare.check_device(spec)
    for line in check_data(spec).lines:
        say(line)
    folder = previous or _new_folder(spec, run_dir)
    with hold(folder):
        if previous is not None:
            _keep_job(folder, spec, say)
        write_resolved(spec, folder / JOB)
        say(f"run: {folder}")
        code, view = Supervisor(spec, folder, resume=previous is not None).run(console, as_json=as_json)
    _finish(view, folder, code, as_json=as_json, say=say)
    return code


def _check_fleet(spec: JobSpec) -> None:
    """Checks that somebody lends the servers of a fleet to the job.

    Raises:
        BadInputError: nobody does.
    """
    if spec.rollout.fleet is not None and _SERVICE_VARIABLE not in os.environ:
        raise BadInputError(
            f"rollout.fleet {spec.rollout.fleet.name!r} is lent by a job service, which does not run this job",
            role="rollout",
            fix="Send the job with `nightshift submit`, or give rollout.url or rollout.servers in its place",
        )


class Supervisor:
    """Starts the two processes of a run, follows its events, and ends everything."""

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        *,
        resume: bool = False,
        commands: dict[str, list[str]] | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """``commands``: role -> command, for "orchestrator" and "agent", in place of the usual ones."""
        self._run_dir = run_dir
        self._run_id = run_dir.name
        self._store = prepare.weight_store(spec, self._run_id)
        self._port = spec.resources.ports.otlp or free_port()
        self._commands = commands or self._usual_commands(resume)
        self._deadlines = deadlines or Deadlines()
        self._interrupts = Interrupts()
        self._told = 0  # interrupts that were answered
        self._view = RunView(run_id=self._run_id)
        self._tail = Tail(run_dir / EVENTS)
        self._segments = Segments()
        root = os.getpid()
        self._memory = PeakMemory(
            lambda: sample(root, self._store),
            lambda: self._segments.look(roles_below(root)),  # often: what is noted too late stays behind after a kill
        )
        self._children: list[Child] = []
        self._policy = RestartPolicy()  # of a runner that was killed

    def run(self, console: Console, *, as_json: bool) -> tuple[int, RunView]:
        """Runs until the runner has ended and nothing is left. Returns the exit code and what the events said."""
        processes.adopt_orphans()
        with (
            self._interrupts.caught(),
            EventLog(self._run_dir / EVENTS, self._run_id) as events,
            progress_for(self._view, console, as_json=as_json) as progress,
        ):
            code = EXIT_FAILED
            # Addresses of an earlier start of this run are no addresses of this one.
            (self._run_dir / SERVICES).unlink(missing_ok=True)
            try:
                runner, agent = self._start("orchestrator"), self._start("agent")
                self._memory.start()
                code = self._follow(runner, agent, progress)
            finally:
                self._end(events, progress)
            return code, self._view

    # Starting ---------------------------------------------------------------------------------------------------------

    def _usual_commands(self, resume: bool) -> dict[str, list[str]]:
        folder = ["--run-dir", str(self._run_dir)]
        runner = [*folder, "--otlp-port", str(self._port), *(["--resume"] if resume else [])]
        return {
            "orchestrator": prepare.module("orchestrator.runner", *runner),
            "agent": prepare.module("services.agent", *folder, "--otlp", self._endpoint),
        }

    @property
    def _endpoint(self) -> str:
        return f"http://{HOST}:{self._port}"

    def _start(self, role: str) -> Child:
        child = processes.start(
            role,
            self._commands[role],
            environment=prepare.environment(self._run_id, self._endpoint),
            log=self._run_dir / "logs" / f"{role}.log",
        )
        self._children.append(child)
        return child

    # While it runs ----------------------------------------------------------------------------------------------------

    def _follow(self, runner: Child, agent: Child, progress: Progress) -> int:
        asked_at = None
        began = time.monotonic()
        while True:
            if (code := runner.poll()) is not None:
                if code >= 0 or agent.poll() is not None or not self._may_restart(code, began, progress):
                    break
                runner, began = self._start("orchestrator"), time.monotonic()
            self._show_new(progress)
            if self._answer_interrupts(progress):
                return EXIT_INTERRUPTED
            if self._interrupts.asked and asked_at is None:
                asked_at = time.monotonic()
                runner.signal(signal.SIGINT)
            if asked_at is not None and time.monotonic() - asked_at > self._deadlines.interrupt:
                progress.say(f"the runner has not ended {self._deadlines.interrupt:.0f} s after Ctrl-C: ending it")
                return EXIT_INTERRUPTED
            if (agent_code := agent.poll()) is not None and runner.wait(1.0) is None:
                # Nothing supervises the roles any more; what the agent said last is the cause.
                self._show_new(progress)
                runner.stop(signal.SIGTERM, self._deadlines.runner, lambda: self._interrupts.hard)
                if self._interrupts.asked:
                    return EXIT_INTERRUPTED
                self._view.cause = self._cause("agent", agent, agent_code)
                return EXIT_BAD_INPUT if agent_code == EXIT_BAD_INPUT else EXIT_FAILED
            time.sleep(_POLL_S)
        self._show_new(progress)
        if self._interrupts.asked:
            return EXIT_INTERRUPTED if code in (EXIT_DONE, EXIT_INTERRUPTED, -signal.SIGINT) else EXIT_FAILED
        if code != EXIT_DONE and not self._view.failure:
            self._view.cause = self._cause("orchestrator", runner, code)
        return exit_code(code)

    def _may_restart(self, code: int, began: float, progress: Progress) -> bool:
        """Whether a runner that a signal ended is to go on from the last checkpoint, beside the services that run."""
        pause = None if self._interrupts.asked else self._policy.died(time.monotonic() - began)
        if pause is None:
            return False
        with EventLog(self._run_dir / EVENTS, self._run_id) as events:
            cause = f"it was ended by signal {signal.Signals(-code).name}"
            events.append("role", role="orchestrator", state="restarting", detail=cause, seconds=pause)
        self._show_new(progress)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not self._interrupts.asked:
            time.sleep(_POLL_S)
        if "--resume" not in self._commands["orchestrator"]:
            self._commands["orchestrator"] += ["--resume"]
        return not self._interrupts.asked

    def _show_new(self, progress: Progress) -> None:
        for event in self._tail.read():
            self._view.apply(event)
            progress.show(event)

    def _answer_interrupts(self, progress: Progress) -> bool:
        """Says what an interrupt does; true where everything is to end now."""
        if self._interrupts.count > self._told:
            self._told = self._interrupts.count
            progress.say(
                "ending at once" if self._interrupts.hard else "saving a checkpoint; Ctrl-C again ends at once"
            )
        return self._interrupts.hard

    def _cause(self, role: str, child: Child, code: int) -> str:
        """Why a process ended: what a role said in its event, else the last line of its log."""
        failed = self._view.roles.get(self._view.failed_role)
        if failed is not None:
            return role_sentence(self._view.failed_role, failed)
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = last_lines(child.log, 1) if child.log is not None else []
        quoted = f": {lines[0]}" if lines else ""
        return f"[{role}] {how}{quoted}. Its log: {child.log}"

    # The end ----------------------------------------------------------------------------------------------------------

    def _end(self, events: EventLog, progress: Progress) -> None:
        """Ends every process, checks that nothing is left, and writes down the peak memory."""
        self._memory.stop()
        for child in self._children:  # the runner first: it talks to what the agent started
            deadline = self._deadlines.agent if child.role == "agent" else self._deadlines.runner
            if self._interrupts.hard:
                child.kill_group()
            if not child.stop(signal.SIGTERM, deadline, lambda: self._interrupts.hard) and not self._interrupts.hard:
                events.append("warning", role=child.role, message=f"did not end within {deadline:.0f} s and was killed")
        if left := processes.sweep(self._run_id, self._deadlines.sweep):
            events.append("warning", role="agent", message=f"left processes behind, which were killed: {left}")
        if self._store.exists():
            shutil.rmtree(self._store, ignore_errors=True)
            events.append("warning", role="agent", message=f"left {self._store} behind, which was removed")
        if abandoned := self._segments.remove_abandoned():
            events.append("warning", role="agent", message=f"left shared memory behind, which was removed: {abandoned}")
        if stuck := processes.processes_of(self._run_id):
            lines = [processes.command_line(pid) for pid in stuck]
            events.append("warning", role="agent", message=f"these processes cannot be ended: {lines}")
        if self._memory.peak:
            events.append("memory", **self._memory.report())
        self._show_new(progress)


def exit_code(code: int) -> int:
    """The command's exit code for the runner's: signals and unknown codes are failures."""
    return code if code in (EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED) else EXIT_FAILED


def _resumable(name: str, spec: JobSpec) -> Path:
    """The folder of an earlier run of the same job. Without a checkpoint the runner begins again at step 0."""
    folder = find_run(name, spec.resources.runs_dir)
    if not (folder / JOB).is_file():
        raise BadInputError(f"{str(folder)!r} holds no {JOB}, so it cannot be resumed", fix="Start the job anew")
    return folder


def _new_folder(spec: JobSpec, run_dir: Path | None) -> Path:
    folder = run_dir.expanduser().resolve() if run_dir else Path(spec.resources.runs_dir) / new_run_id(spec.name)
    make_run(folder)
    return folder


def _keep_job(folder: Path, spec: JobSpec, say: Any) -> None:
    """Keeps the job of an earlier start where the new one differs, and says in what."""
    old = folder / JOB
    if not old.is_file():
        return
    changes = differences(read_resolved(old).model_dump(mode="json"), spec.model_dump(mode="json"))
    if changes:
        number = 1 + sum(1 for _ in folder.glob("job.*.yaml"))
        old.rename(folder / f"job.{number}.yaml")
        say(f"changed since the run was started: {', '.join(changes)}")


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two jobs differ: ``key: old -> new``."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
        ]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


def _finish(view: RunView, folder: Path, code: int, *, as_json: bool, say: Any) -> None:
    whole = RunView(run_id=folder.name)  # a resumed run's table starts where the run started
    for event in read_events(folder / EVENTS):
        whole.apply(event)
    figures = report(whole, folder)
    if as_json:
        print_json({"time": time.time(), "kind": "report", "exit_code": code, "error": view.failure, **figures})
    elif code in (EXIT_DONE, EXIT_INTERRUPTED) or view.done:
        for line in report_lines(figures):
            say(line)
    if code == EXIT_INTERRUPTED:
        trainer = checkpoints(folder, "trainer")
        hint = f"go on with --resume {folder.name}" if trainer else "no checkpoint was made"
        print(f"interrupted at step {view.step}: {hint}", file=sys.stderr)
    elif code != EXIT_DONE:
        fail(view.failure or f"the run failed; its logs: {folder / 'logs'}")
