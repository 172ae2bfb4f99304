"""Client of the trainer service."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from nightshift.wire import codec, listen
from nightshift.wire.errors import RoleError, RoleTimeoutError, VersionConflictError
from nightshift.wire.experience import LossSpec, Sample, pack_loss, pack_samples
from nightshift.wire.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from orchestrator.runner.trainer_files import TrainerFiles
from orchestrator.runner.weight_link import WeightLink

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_SHORT_S = 60.0
#: A server that goes down while it works on a call may cancel it. A call that is cancelled here raises something else.
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
#: Status of an update that was not applied and may be tried again: out of order, or an error inside the trainer.
_ATTEMPT_FAILED = frozenset({grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL})


class AttemptFailedError(RoleError):
    """An attempt at an update failed and left the weights as they were: another one may succeed."""


class TrainerLostError(RoleError):
    """The trainer's weights are gone: a rank or the whole trainer died, or another one answers in its place."""


@dataclass(slots=True)
class Publication:
    """Weights that rollout servers can take, and what they must answer afterwards."""

    version: str
    backend: str
    update_info: dict[str, Any]
    digest: str
    bytes: int
    probe: list[dict[str, Any]]
    changed_fraction: float
    seconds: float
    link: WeightLink | None = None  # by which they are sent; None: the server takes them by itself


@dataclass(slots=True)
class Updated:
    """Result of a part of an update; of the whole step where it was the last part."""

    stepped: bool
    metrics: dict[str, float]
    seconds: float
    peak_memory_bytes: int
    tensors: list[dict[str, Any]] = field(default_factory=list)


class TrainerClient:
    """The trainer behind ``grpc://host:port``.

    Every call that changes state is idempotent on the trainer's side, so that a lost answer is asked for again.

    Args:
        away_s: how long it may be away before it counts as lost.
        replaced: whether the agent has given this trainer up.
        token: that its calls must carry; "": none.
        files: the folder of a trainer on another host; None: it writes into the run's folder itself.
    """

    def __init__(
        self,
        url: str,
        *,
        run_id: str,
        job_trace_id: str,
        update_timeout_s: float,
        away_s: float,
        replaced: Callable[[], bool],
        token: str = "",
        files: TrainerFiles | None = None,
    ) -> None:
        self._metadata = listen.metadata(token)
        self._files = files
        self._run_id = run_id
        self._job_trace_id = job_trace_id
        self._timeout_s = update_timeout_s
        self._away_s = away_s
        self._replaced = replaced
        self._channel = grpc.aio.insecure_channel(url.removeprefix("grpc://"), options=_OPTIONS)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        self._link = WeightLink(self._once)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()
        if self._files is not None:
            await self._files.close()

    async def describe(self) -> trainer_pb2.DescribeTrainerResponse:
        """Model, ranks and the version of the weights."""
        request = trainer_pb2.DescribeTrainerRequest(context=self._context(""))
        answer: trainer_pb2.DescribeTrainerResponse = await self._call("Describe", request, _SHORT_S)
        return answer

    async def load(self, state_dir: str, version: str) -> dict[str, Any]:
        """Loads a resume state, or with an empty ``state_dir`` only names the weights; returns the manifest."""
        request = trainer_pb2.LoadRequest(
            context=self._context(""), state_dir=self._there(state_dir), policy_version=version
        )
        answer = await self._call("Load", request, self._timeout_s)
        return dict(json.loads(answer.manifest)) if answer.manifest else {}

    async def update(
        self,
        samples: Sequence[Sample],
        loss: LossSpec,
        *,
        step: int,
        expect: str,
        new: str,
        learning_rate: float,
        traceparent: str,
        attempt: int = 0,
        part: int = 0,
        final: bool = True,
        debug: bool = False,
    ) -> Updated:
        """Adds a part of a batch; the final part makes the optimiser step. ``debug`` asks for its tensors.

        Raises:
            AttemptFailedError: the trainer failed below this part, and what it had of this attempt is gone.
        """
        request = trainer_pb2.UpdateRequest(
            context=self._context(traceparent, expect),
            step=step,
            attempt=attempt,
            expect_version=expect,
            new_version=new,
            part=part,
            final=final,
            samples=pack_samples(list(samples)),
            loss=pack_loss(loss),
            learning_rate=learning_rate,
            debug=debug,
        )
        answer = await self._call("Update", request, self._timeout_s)
        tensors = codec.unpack(answer.tensors) if answer.tensors else []
        return Updated(answer.stepped, dict(answer.metrics), answer.seconds, answer.peak_memory_bytes, tensors)

    async def loss(
        self, samples: Sequence[Sample], loss: LossSpec, *, version: str, traceparent: str
    ) -> dict[str, float]:
        """Metrics that an update with a whole batch would report, less those of its gradient; nothing is changed."""
        request = trainer_pb2.LossRequest(
            context=self._context(traceparent, version), samples=pack_samples(list(samples)), loss=pack_loss(loss)
        )
        return dict((await self._call("Loss", request, self._timeout_s)).metrics)

    async def log_probs(
        self, samples: Sequence[Sample], temperature: float, version: str, traceparent: str
    ) -> list[Any]:
        """Log-probs of the samples' response tokens under the current weights: one float32 array [T] per sample."""
        sequences = [
            {
                "id": sample.sample_id,
                "prompt_ids": sample.prompt_ids,
                "response_ids": sample.response_ids,
                "temperature": temperature,
            }
            for sample in samples
            if len(sample.response_ids)
        ]
        request = trainer_pb2.LogProbsRequest(
            context=self._context(traceparent, version), samples=codec.pack(sequences)
        )
        answer = await self._call("LogProbs", request, self._timeout_s)
        found = {result["id"]: result["logprobs"] for result in codec.unpack(answer.results)}
        for sample in samples:
            values = found.get(sample.sample_id, np.zeros(0, np.float32))
            if values.shape != sample.response_ids.shape:
                raise RoleError(f"{values.size} log-probs for {len(sample.response_ids)} tokens", role="trainer")
        return [found.get(sample.sample_id, np.zeros(0, np.float32)) for sample in samples]

    async def publish(self, version: str, probe: Sequence[Any], traceparent: str) -> Publication:
        """Writes the current weights to the weight store and scores the probe with them."""
        request = trainer_pb2.PublishRequest(
            context=self._context(traceparent, version), policy_version=version, probe=codec.pack(list(probe))
        )
        answer = await self._call("Publish", request, self._timeout_s)
        return Publication(
            version=version,
            backend=answer.backend,
            update_info=codec.unpack(answer.update_info),
            digest=answer.digest,
            bytes=answer.bytes,
            probe=codec.unpack(answer.probe) if answer.probe else [],
            changed_fraction=answer.changed_fraction,
            seconds=answer.seconds,
            link=self._link if answer.backend == "nccl" else None,
        )

    async def save(self, manifest: dict[str, Any], *, state_dir: str, export_dir: str, traceparent: str) -> float:
        """Writes a checkpoint; returns the trainer's seconds.

        Of a trainer on another host, export and manifest are fetched; the resume state stays there.
        """
        request = trainer_pb2.SaveRequest(
            context=self._context(traceparent),
            state_dir=self._there(state_dir),
            export_dir=self._there(export_dir),
            manifest=json.dumps(manifest),
        )
        seconds = float((await self._call("Save", request, self._timeout_s)).seconds)
        if self._files is not None:
            await self._files.fetch(state_dir, export_dir)
        return seconds

    async def forget(self, folders: Sequence[Path]) -> None:
        """Removes what a trainer on another host has kept of checkpoints that were rotated away here."""
        if self._files is not None:
            await self._files.remove(folders)

    def _there(self, folder: str) -> str:
        """A folder of the run as the trainer's host names it."""
        return folder if self._files is None or not folder else self._files.there(Path(folder))

    async def _once(self, name: str, request: Any, timeout_s: float) -> Any:
        """A call that concerns one server: its failure is that of bringing weights to that server, and no more."""
        try:
            return await getattr(self._stub, name)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            cause = _first_line(error.details())
            raise RoleError(f"{name} failed ({error.code().name}): {cause}", role="trainer") from error

    async def _call(self, name: str, request: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + self._away_s
        pause = 0.5
        while True:
            try:
                return await getattr(self._stub, name)(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                code, cause = error.code(), _first_line(error.details())
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise RoleTimeoutError(f"{name} took longer than {timeout_s:g} s", role="trainer") from error
                if code is grpc.StatusCode.UNAVAILABLE and "rank" in cause:
                    raise TrainerLostError(cause.removeprefix("[trainer] "), role="trainer") from error
                if code is grpc.StatusCode.FAILED_PRECONDITION and not self._replaced():
                    raise VersionConflictError(f"{name} refused: {cause}", role="trainer") from error
                if self._replaced():
                    raise TrainerLostError("it was started again", role="trainer") from error
                if name == "Update" and code in _ATTEMPT_FAILED:
                    raise AttemptFailedError(f"{name} failed ({code.name}): {cause}", role="trainer") from error
                if code not in _AWAY:
                    raise RoleError(f"{name} failed ({code.name}): {cause}", role="trainer") from error
                if time.monotonic() + pause > deadline:
                    raise TrainerLostError(f"away for {self._away_s:g} s: {cause}", role="trainer") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _context(self, traceparent: str, version: str = "") -> common_pb2.Context:
        return common_pb2.Context(
            run_id=self._run_id, traceparent=traceparent, policy_version=version, job_trace_id=self._job_trace_id
        )


def _first_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[0] if lines else "no detail"
