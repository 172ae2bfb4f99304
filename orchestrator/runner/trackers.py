"""TensorBoard, Weights & Biases and MLflow behind one interface. Each is imported only where a job names it."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from nightshift.wire.errors import BadInputError

_log = logging.getLogger(__name__)
_CLOSE_S = 30.0


class Tracker(Protocol):
    """Takes the metrics of a run, step by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes finite values of one step or evaluation."""

    def drop_after(self, step: int) -> None:
        """The run goes back to ``step`` and makes the steps behind it again."""

    def close(self) -> None:
        """Writes out what is buffered."""


class TensorBoardTracker:
    """Event files in ``tensorboard/`` of the run's folder."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one event with a value per metric."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def drop_after(self, step: int) -> None:
        """TensorBoard leaves out what earlier files hold from the next step on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Writes out what is buffered."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases in ``wandb/`` of the run's folder, offline: ``wandb sync`` uploads it.

    A resumed run makes another local run of the same id, which the upload joins to the first.
    """

    def __init__(self, run_dir: Path, run_id: str, project: str) -> None:
        wandb = _import("wandb")
        self._run: Any = wandb.init(
            project=project,
            id=run_id,
            name=run_id,
            dir=str(run_dir),
            mode="offline",
            resume="allow",
            settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
        )
        # An axis of our own: W&B drops a value whose step is not above the last one, also an evaluation of that step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the values against the axis ``step``."""
        self._run.log({**metrics, "step": step})

    def drop_after(self, step: int) -> None:
        """Offline files cannot be cut: the steps that are made again are logged again, and said to be."""
        self._run.log({"resumed_from_step": step, "step": step})

    def close(self) -> None:
        """Ends the run and W&B's own process, which writes the file's last block when it ends."""
        self._run.finish()
        _import("wandb").teardown()


class MlflowTracker:
    """A run of MLflow, found again by the tag ``nightshift.run_id`` where a run is resumed.

    Calls go through a thread of their own: a slow server never holds up the run's loop, and one that is away loses its
    metrics without failing the run; what it missed is in ``metrics.jsonl``.

    Raises:
        BadInputError: no MLflow answers at the URI when the run begins.
    """

    def __init__(self, run_id: str, uri: str, experiment: str = "nightshift") -> None:
        # The client's own patience (minutes) would hold up the end of a run.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        mlflow = _import("mlflow")
        self._metric: Any = _import("mlflow.entities").Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._lost = 0
        self._logged: dict[str, set[int]] = {}
        try:
            self._run_id = self._find(run_id, experiment)
        except mlflow.exceptions.MlflowException as error:
            raise BadInputError(
                f"MLflow at {uri} does not answer: {str(error).splitlines()[0]}",
                role="job",
                fix="Correct tracking.mlflow, or leave it out",
            ) from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")

    def _find(self, run_id: str, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        runs = self._client.search_runs([place], f"tags.`nightshift.run_id` = '{run_id}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(place, run_name=run_id, tags={"nightshift.run_id": run_id})
        identifier = str(run.info.run_id)
        if runs:
            self._client.update_run(identifier, status="RUNNING")
            for name in run.data.metrics:
                self._logged[name] = {one.step for one in self._client.get_metric_history(identifier, name)}
        return identifier

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the values; a step that an earlier start logged keeps its value."""
        now = int(time.time() * 1000)
        values = [
            self._metric(name, value, now, step)
            for name, value in metrics.items()
            if step not in self._logged.get(name, ())
        ]
        self._thread.submit(self._send, lambda: self._client.log_batch(self._run_id, metrics=values), f"step {step}")

    def drop_after(self, step: int) -> None:
        """MLflow keeps what it has: a step that is made again is not logged twice."""

    def close(self) -> None:
        """Marks the run as finished, after what is queued; waits for 30 seconds at most."""
        done = self._thread.submit(self._send, lambda: self._client.set_terminated(self._run_id), "the run's end")
        try:
            done.result(timeout=_CLOSE_S)
        except TimeoutError:
            _log.warning("waited %.0f s for MLflow to take the last metrics", _CLOSE_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _send(self, call: Callable[[], Any], what: str) -> None:
        try:
            call()
        except Exception as error:
            self._lost += 1
            if self._lost == 1:
                _log.warning("MLflow did not take %s, and may miss what follows: %s", what, error)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise BadInputError(
            f"tracking.{package} is set, and the package {package!r} is not installed",
            role="job",
            fix=f"Install it, or leave tracking.{package} out",
        ) from error
