"""A pool of processes that run the user's reward function, with a time limit that is kept from outside.

One thread owns the processes. Samples wait in one queue; each free worker takes one, and its clock starts then. A
worker that passes the limit is killed with its process group and replaced at once, so that the next batch finds the
pool at full size; nothing that user code does (an alarm, a spinning loop, closing its files) can prevent that.

A few hanging samples must not hold up the rest, and a batch of hanging ones must not take the limit times its length.
So there is a second, softer threshold: while a sample has been running for longer than two seconds *and* three times
the longest of the recent ones (or has reached the limit), each sample that waits behind it gets a worker of its own,
up to MAX_WORKERS processes. All of a batch then hang at the same time, and the batch ends about two seconds after
the limit whatever the number of workers. A reward that is slow but steady keeps to its number of workers once the
first samples have shown how long they take. The surplus ends when the queue is empty.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from nightshift.wire.errors import BadInputError, NightshiftError, RoleError, RoleTimeoutError, WireError
from nightshift.wire.scoring import RewardInput, RewardResult
from services.scorers import frames
from services.scorers.memory import peak_memory_bytes
from services.scorers.reward_function import BATCH, split_reference

#: Most processes of one pool, while samples wait behind one that seems to hang.
MAX_WORKERS = 32
_ROLE = "reward"
_PATIENCE_S = 2.0
_RECENT = 64  # samples whose longest time says what is normal
_CHUNK = 1 << 16
_REAP_S = 5.0
_ROOT = Path(__file__).resolve().parents[2]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    results: list[RewardResult | None]
    done: Future[list[RewardResult]]
    missing: int


@dataclass(slots=True)
class _Task:
    batch: _Batch
    index: int
    sample_id: str
    number: int
    frame: bytes


@dataclass(eq=False, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float  # of loading, then of the running sample
    started: float
    state: str = "loading"  # "loading", "idle" or "busy"
    task: _Task | None = None
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    reader: frames.FrameReader = field(default_factory=frames.FrameReader)


class RewardPool:
    """Worker processes for one reward function.

    Args:
        function: ``path.py:function``.
        workers: processes that are kept.
        timeout_s: longest time of one sample.
        start_timeout_s: longest time in which a worker must have imported the file.
    """

    def __init__(self, function: str, *, workers: int = 1, timeout_s: float = 10.0, start_timeout_s: float = 60.0):
        self.path, self.name = split_reference(function)
        try:
            self._source = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInputError(f"{self.path} cannot be read: {error}", role=_ROLE, fix="Name a Python file") from error
        self._size = workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._workers: list[_Worker] = []
        self._queue: deque[_Task] = deque()
        self._inbox: deque[_Task] = deque()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._numbers = itertools.count(1)
        self._hurry = False
        self._load_error: NightshiftError | None = None
        self._ready: Future[None] = Future()
        self._closing = False
        self._lock = threading.Lock()  # a sample is taken in before the pool closes, or refused
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        # The workers die with the thread that started them (PR_SET_PDEATHSIG looks at the thread), so that all of them
        # are started by this one.
        self._thread = threading.Thread(target=self._run, name=f"reward-pool-{self.name}", daemon=True)

    def start(self) -> None:
        """Starts the workers and waits until each has loaded the function.

        Raises:
            BadInputError: the file cannot be imported, or the function cannot be called with a sample.
            RoleTimeoutError: a worker had not loaded it after ``start_timeout_s``.
        """
        self._thread.start()
        try:
            self._ready.result(self._start_timeout_s + _REAP_S)
        except BaseException:
            self.close()
            raise

    def submit_batch(self, samples: Sequence[RewardInput]) -> Future[list[RewardResult]]:
        """Queues samples as one call of a batched function; the future gives one result per sample, in order.

        Raises:
            WireError: a sample cannot be encoded.
            RoleError: the pool is closed.
        """
        done: Future[list[RewardResult]] = Future()
        if not samples:
            done.set_result([])
            return done
        whole = cast(RewardInput, {"id": "batch", BATCH: list(samples)})

        def spread(inner: Future[list[RewardResult]]) -> None:
            if error := inner.exception():
                done.set_exception(error)
                return
            done.set_result(_spread(inner.result()[0], samples))

        self.submit([whole]).add_done_callback(spread)
        return done

    def submit(self, samples: Sequence[RewardInput]) -> Future[list[RewardResult]]:
        """Queues samples; the future gives one result per sample, in order.

        Raises:
            WireError: a sample cannot be encoded.
            RoleError: the pool is closed.
        """
        done: Future[list[RewardResult]] = Future()
        batch = _Batch([None] * len(samples), done, len(samples))
        tasks = []
        for index, sample in enumerate(samples):
            number = next(self._numbers)
            frame = frames.encode({"task": number, "sample": dict(sample)})
            tasks.append(_Task(batch, index, sample["id"], number, frame))
        done.set_running_or_notify_cancel()  # from now on a caller that goes away does not cancel it
        if not tasks:
            done.set_result([])
        with self._lock:
            if not self.alive:
                raise RoleError(f"the pool of {self.name} is closed", role=_ROLE)
            self._inbox.extend(tasks)
        self._wake()
        return done

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Scores samples and waits for the results.

        Raises:
            WireError: a sample cannot be encoded.
            RoleTimeoutError: the pool itself gave no answer within the limit of all samples one after the other.
        """
        patience = self._timeout_s * (len(samples) + 1) + self._start_timeout_s
        try:
            return self.submit(samples).result(patience)
        except TimeoutError as error:
            message = f"waited {patience:.0f} s for {len(samples)} results of {self.name}"
            raise RoleTimeoutError(message, role=_ROLE) from error

    def close(self) -> None:
        """Kills the workers; samples that still wait fail. Safe to call twice."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(2 * _REAP_S)

    @property
    def alive(self) -> bool:
        """Whether the pool takes samples."""
        return self._thread.is_alive() and not self._closing

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, each the leader of its own process group."""
        return [worker.process.pid for worker in list(self._workers)]

    @property
    def peak_memory_bytes(self) -> int:
        """Sum of the peak resident memory of the workers that live now."""
        return sum(peak_memory_bytes(pid) for pid in self.worker_pids)

    # From here on everything runs on the pool's own thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._resize()
                self._dispatch()
                for key, events in self._selector.select(self._wait_s()):
                    if key.data is None:
                        self._drain_wake()
                    elif key.data in self._workers:
                        self._serve(key.data, events)
                self._expire()
        except Exception:
            _log.exception("[reward] the pool of %s failed", self.name)
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        for worker in list(self._workers):
            self._kill(worker)
        closed = RoleError(f"the pool of {self.name} was closed", role=_ROLE)
        for task in [*self._queue, *self._inbox]:
            if not task.batch.done.done():
                task.batch.done.set_exception(closed)
        if not self._ready.done():
            self._ready.set_exception(closed)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full (then it wakes anyway), or closed
            os.write(self._wake_write, b"\0")

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, _CHUNK):
                pass

    def _resize(self) -> None:
        while self._inbox:
            self._queue.append(self._inbox.popleft())
        if not self._queue:
            self._hurry = False
        elif any(self._overdue_at(worker) <= time.monotonic() for worker in self._workers):
            self._hurry = True
        spare = [worker for worker in self._workers if worker.state != "busy"]
        wanted = self._size
        if self._hurry:
            busy = len(self._workers) - len(spare)
            wanted = max(wanted, min(busy + len(self._queue), MAX_WORKERS))
        if self._load_error is not None and self._queue:
            self._give_up_one(self._load_error)
        while self._load_error is None and len(self._workers) < wanted:
            self._spawn()
        for worker in [worker for worker in spare if worker.state == "idle"][: max(0, len(self._workers) - wanted)]:
            self._kill(worker)

    def _give_up_one(self, error: NightshiftError) -> None:
        """A replacement could not be loaded: one sample fails with the reason, and the next attempt is made for the
        next sample, so that a broken file cannot start processes without end."""
        self._load_error = None
        if not any(worker.state in ("idle", "busy") for worker in self._workers):
            self._finish(self._queue.popleft(), "raised", f"no worker could be started again: {error.message}", 0.0)

    def _spawn(self) -> None:
        environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.scorers.reward_worker", f"{self.path}:{self.name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        now = time.monotonic()
        worker = _Worker(process, deadline=now + self._start_timeout_s, started=now)
        self._workers.append(worker)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self._send(worker, frames.encode({"source": self._source}))

    def _dispatch(self) -> None:
        for worker in self._workers:
            if not self._queue:
                return
            if worker.state == "idle":
                task = self._queue.popleft()
                worker.state, worker.task, worker.started = "busy", task, time.monotonic()
                worker.deadline = worker.started + self._timeout_s
                self._send(worker, task.frame)

    def _send(self, worker: _Worker, data: bytes) -> None:
        worker.unsent = memoryview(data)
        assert worker.process.stdin is not None
        with contextlib.suppress(KeyError):  # still registered: it answered without reading all, and will be replaced
            self._selector.register(worker.process.stdin, selectors.EVENT_WRITE, worker)

    def _serve(self, worker: _Worker, events: int) -> None:
        process = worker.process
        assert process.stdin is not None
        assert process.stdout is not None
        if events & selectors.EVENT_WRITE:
            try:
                worker.unsent = worker.unsent[os.write(process.stdin.fileno(), worker.unsent) :]
            except BlockingIOError:
                pass
            except OSError:  # it has ended; reading says so too
                worker.unsent = memoryview(b"")
            if not worker.unsent:
                self._selector.unregister(process.stdin)
        if events & selectors.EVENT_READ:
            try:
                data = os.read(process.stdout.fileno(), _CHUNK)
                if not data:
                    self._lost(worker)
                    return
                for message in worker.reader.feed(data):
                    self._receive(worker, message)
            except BlockingIOError:
                pass
            except (WireError, KeyError, TypeError, ValueError) as error:
                self._replace(worker, "raised", f"a worker of {self.name} wrote something that is no answer: {error}")

    def _receive(self, worker: _Worker, message: Any) -> None:
        task = worker.task
        if worker.state == "loading":
            if "refused" in message:
                self._load_failed(worker, BadInputError(message["refused"], role=_ROLE, fix=message["fix"]))
                return
            worker.state = "idle"
            if not self._ready.done() and sum(w.state != "loading" for w in self._workers) >= self._size:
                self._ready.set_result(None)
        elif task is None or message["task"] != task.number:
            raise WireError("an answer to another sample")
        else:
            seconds = float(message["seconds"])
            score = None if message["score"] is None else float(message["score"])
            parts = {str(key): float(value) for key, value in message["parts"].items()}
            worker.state, worker.task = "idle", None
            self._recent.append(seconds)
            many = message.get("many")
            self._finish(task, str(message["error_type"]), str(message["error"]), seconds, score, parts, many)

    def _finish(
        self,
        task: _Task,
        error_type: str,
        error: str,
        seconds: float,
        score: float | None = None,
        parts: dict[str, float] | None = None,
        many: list[dict[str, Any]] | None = None,
    ) -> None:
        batch = task.batch
        result = RewardResult(
            id=task.sample_id, score=score, parts=parts or {}, error_type=error_type, error=error, seconds=seconds
        )
        batch.results[task.index] = result if many is None else cast(RewardResult, {**result, "many": many})
        batch.missing -= 1
        if batch.missing == 0:
            batch.done.set_result([result for result in batch.results if result is not None])

    def _lost(self, worker: _Worker) -> None:
        """The worker's pipe ended: user code ended the process, or closed the pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(0.5)  # so that the exit code is its own, not that of our kill
        code = worker.process.returncode
        how = "closed its pipe" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
        if worker.state == "loading":
            message = f"a worker ended while it imported {self.path} ({how})"
            self._load_failed(worker, BadInputError(message, role=_ROLE, fix="A reward file must not end its process"))
            return
        self._replace(worker, "raised", f"function {self.name} ended its process ({how})")

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.state != "idle" and w.deadline <= now]:
            if worker.state == "loading":
                message = f"waited {self._start_timeout_s:g} s for a worker to import {self.path}"
                fix = "Make the import of the file faster, or raise the start deadline"
                self._load_failed(worker, RoleTimeoutError(message, role=_ROLE, fix=fix))
                continue
            error = f"function {self.name} gave no result within {self._timeout_s:g} s"
            self._hurry = True
            self._replace(worker, "timeout", error)

    def _replace(self, worker: _Worker, error_type: str, error: str) -> None:
        task = worker.task
        seconds = time.monotonic() - worker.started
        self._kill(worker)  # _resize starts another one before the next wait
        if task is not None:
            self._finish(task, error_type, error, seconds)
        else:
            _log.warning("[reward] an idle worker of %s ended: %s", self.name, error)

    def _load_failed(self, worker: _Worker, error: NightshiftError) -> None:
        self._kill(worker)
        if self._ready.done():
            self._load_error = error
            _log.warning("%s", error)
        else:
            self._ready.set_exception(error)
            self._closing = True

    def _kill(self, worker: _Worker) -> None:
        process = worker.process
        self._workers.remove(worker)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
            with contextlib.suppress(OSError):
                pipe.close()
        # The group outlives its leader as long as a child of the user's function does.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            _log.warning("[reward] process %d is still there %.0f s after SIGKILL", process.pid, _REAP_S)

    def _overdue_at(self, worker: _Worker) -> float:
        """When the worker's sample begins to look as if it hangs; never, where it runs none."""
        if worker.state != "busy":
            return float("inf")
        patience = max(_PATIENCE_S, 3 * max(self._recent, default=0.0))
        return worker.started + min(patience, self._timeout_s)

    def _wait_s(self) -> float | None:
        """Seconds until the next deadline; None: until a pipe or the inbox has something."""
        if self._load_error is not None and self._queue:
            return 0.0
        moments = [worker.deadline for worker in self._workers if worker.state != "idle"]
        if self._queue and not self._hurry:
            moments += [self._overdue_at(worker) for worker in self._workers]
        return max(0.0, min(moments) - time.monotonic()) if moments else None


def check(function: str, timeout_s: float = 60.0) -> None:
    """Loads a reward function once, in a process of its own, and ends it: a check before anything large starts.

    Raises:
        BadInputError: the file cannot be imported, or the function cannot be called with a sample.
        RoleTimeoutError: it was not loaded within ``timeout_s``.
    """
    pool = RewardPool(function, start_timeout_s=timeout_s)
    pool.start()
    pool.close()


def _spread(whole: RewardResult, samples: Sequence[RewardInput]) -> list[RewardResult]:
    """The result of a batched call as one per sample; what ended the whole call ended each."""
    seconds = whole["seconds"] / len(samples)
    found: list[RewardResult] = []
    for sample, own in zip(samples, whole.get("many") or [whole] * len(samples), strict=True):  # type: ignore[misc]
        found.append(
            RewardResult(
                id=sample["id"],
                score=own["score"],
                parts=dict(own["parts"]),
                error_type=own["error_type"],
                error=own["error"],
                seconds=seconds,
            )
        )
    return found
