"""The coordinator: one queue of calls, idempotent updates, and what the ranks do for them. No torch, no Ray."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from opentelemetry import trace

from nightshift.wire import codec
from nightshift.wire.errors import BadInputError, RoleError, VersionConflictError
from nightshift.wire.experience import LossSpec, unpack_loss, unpack_samples
from nightshift.wire.scoring import SequenceInput, SequenceResult
from nightshift.wire.telemetry import context_from
from services.trainer.aggregate import divisor
from services.trainer.batching import trained
from services.trainer.checks import check_loss_spec, check_samples, check_sequences
from services.trainer.folders import commit, read_manifest, temporary
from services.trainer.sender import WeightSender
from services.trainer.sums import PartSums, to_metrics
from services.trainer.updates import PartKey, UpdateLog

#: Key of what the trainer adds to a manifest.
MANIFEST_KEY = "trainer"


class RankFailedError(RoleError):
    """A rank died, hung or lost step with the others; the trainer must be started again."""


class Ranks(Protocol):
    """The ranks as the coordinator sees them."""

    world: int

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank; results in rank order.

        Raises:
            RankFailedError: the ranks cannot go on.
            NightshiftError: what a rank raised; the ranks can go on.
        """
        ...

    async def beside(self, method: str, *args: Any) -> Any:
        """See :class:`services.trainer.sender.Beside`."""
        ...

    def give_up(self, error: RankFailedError) -> None:
        """The ranks cannot go on: calls raise this from now on, and whoever keeps the trainer starts it again."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """One Update request."""

    key: PartKey
    expect_version: str
    new_version: str
    final: bool
    samples: bytes
    loss: bytes
    learning_rate: float
    traceparent: str = ""
    debug: bool = False


@dataclass(frozen=True, slots=True)
class UpdateAnswer:
    """Its answer."""

    applied: bool
    stepped: bool
    metrics: dict[str, float]
    seconds: float
    peak_memory_bytes: int
    repeated: bool = False
    tensors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PublishAnswer:
    """Answer to Publish."""

    update_info: dict[str, Any]
    digest: str
    bytes: int
    probe: list[SequenceResult]
    seconds: float
    changed_fraction: float
    backend: str = "safetensors"


@dataclass(slots=True)
class _Batch:
    """What the open attempt has accumulated."""

    spec: LossSpec
    early_divisor: float  # what the loss of each part was divided by; 0: the division is left for the end
    sums: PartSums = field(default_factory=PartSums)
    tokens: int = 0
    sequences: int = 0


class Coordinator:
    """State of the trainer, and its calls, one at a time.

    A call that was begun goes on when its caller goes away; a retry of a running part waits for the same result.

    Args:
        ranks: the ranks, set up.
        facts: what rank 0 said of itself.
        store: folder of published weights.
        export_dtype: precision of HF exports; None: that of the parameters.
        tracer: gives the spans ``trainer.*``.
    """

    def __init__(
        self,
        ranks: Ranks,
        facts: dict[str, Any],
        store: Path,
        export_dtype: str | None = None,
        tracer: trace.Tracer | None = None,
    ) -> None:
        self.facts = facts
        self.incarnation = secrets.token_hex(8)
        self.optimizer_steps = int(facts["optimizer_steps"])
        self.sender = WeightSender(ranks)
        self._ranks = ranks
        self._store = store
        self._export_dtype = export_dtype
        self._tracer = tracer or trace.get_tracer("nightshift")
        self._turn = asyncio.Lock()
        self._log: UpdateLog[UpdateAnswer] = UpdateLog()
        self._running: dict[PartKey, asyncio.Task[UpdateAnswer]] = {}
        self._batch: _Batch | None = None
        self._published: tuple[str, PublishAnswer] | None = None

    @property
    def version(self) -> str:
        """Policy version of the weights."""
        return self._log.version

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._ranks.world

    async def update(self, call: UpdateCall) -> UpdateAnswer:
        """Adds a part, and applies the step with the final one.

        Raises:
            BadInputError: loss or samples cannot be used.
            VersionConflictError: the weights have another version.
            OrderError: the part is not the one whose turn it is.
            RankFailedError: the ranks cannot go on.
        """
        running = self._running.get(call.key)
        if running is not None:
            return replace(await asyncio.shield(running), repeated=True)
        task = asyncio.create_task(self._update(call), name=f"update {call.key}")
        self._running[call.key] = task
        task.add_done_callback(lambda done: self._finished(call.key, done))
        return await asyncio.shield(task)

    async def loss(self, samples: bytes, loss: bytes, version: str, traceparent: str = "") -> dict[str, float]:
        """Metrics that an update with a whole batch would report, less those of its gradient. Nothing is changed.

        Raises:
            BadInputError: loss or samples cannot be used.
            VersionConflictError: the weights have another version.
            RankFailedError: the ranks cannot go on.
        """
        spec, given = unpack_loss(loss), unpack_samples(samples)
        check_loss_spec(spec)
        check_samples(given, spec, self.facts["vocab_size"], self.facts["max_positions"])
        kept = trained(given)

        async def work() -> dict[str, float]:
            async with self._span("trainer.loss", traceparent, **{"nightshift.policy_version": version}):
                self._expect(version)
                batch = _Batch(spec, 0.0, PartSums(), sum(sample.trained_tokens for sample in kept), len(kept))
                if kept:
                    for sums in await self._ranks.call("evaluate", samples, loss):
                        batch.sums = batch.sums + sums
                return to_metrics(batch.sums, spec, _divisor(spec, batch))

        metrics: dict[str, float] = await _uninterrupted(work())
        return metrics

    async def log_probs(
        self, sequences: Sequence[SequenceInput], version: str = "", traceparent: str = ""
    ) -> list[SequenceResult]:
        """Log-probs of response tokens under the current weights, in the order of the request.

        Raises:
            BadInputError: a sequence cannot be used.
            VersionConflictError: ``version`` is given and is not that of the weights.
        """
        check_sequences(sequences, self.facts["vocab_size"], self.facts["max_positions"])

        async def work() -> list[SequenceResult]:
            async with self._span("trainer.log_probs", traceparent, sequences=len(sequences)):
                if version:
                    self._expect(version)
                return await self._log_probs(sequences, exact=False)

        return await _uninterrupted(work())

    async def publish(self, version: str, probe: Sequence[SequenceInput], traceparent: str = "") -> PublishAnswer:
        """Publishes the weights, and takes log-probs of the probe without autocast.

        A version that was published already is not written again.

        Raises:
            VersionConflictError: the weights have another version.
            RoleError: the store cannot be written.
        """
        check_sequences(probe, self.facts["vocab_size"], self.facts["max_positions"])

        async def work() -> PublishAnswer:
            async with self._span("trainer.publish", traceparent, **{"nightshift.policy_version": version}):
                self._expect(version)
                began = time.monotonic()
                values = await self._log_probs(probe, exact=True)
                if self._published is not None and self._published[0] == version:
                    answer = self._published[1]
                    if answer.backend != "safetensors" or (self._store / answer.update_info["path"]).is_file():
                        return replace(answer, probe=values, seconds=time.monotonic() - began)
                await self.sender.settle()
                written = next(filter(None, await self._ranks.call("publish", str(self._store))))
                answer = PublishAnswer(
                    update_info=written.update_info,
                    digest=written.digest,
                    bytes=written.bytes,
                    probe=values,
                    seconds=time.monotonic() - began,
                    changed_fraction=written.changed_fraction,
                    backend=written.backend,
                )
                self._published = (version, answer)
                self.sender.version = version if answer.backend == "nccl" else ""
                return answer

        return await _uninterrupted(work())

    async def save(self, state_dir: str, export_dir: str, manifest: str, traceparent: str = "") -> tuple[float, int]:
        """Writes an HF export, a resume state, or both, in this order: the resume state commits.

        Returns:
            Seconds and bytes.

        Raises:
            BadInputError: the manifest is not a JSON object.
            RoleError: a folder cannot be written; nothing appears under its name then.
        """
        try:
            given = json.loads(manifest) if manifest else {}
        except ValueError as error:
            raise BadInputError(f"the manifest is not JSON: {error}", role="trainer") from error
        if not isinstance(given, dict):
            raise BadInputError(f"the manifest is a JSON {type(given).__name__}, expected an object", role="trainer")

        async def work() -> tuple[float, int]:
            async with self._span("trainer.save", traceparent, **{"nightshift.policy_version": self.version}):
                began = time.monotonic()
                size = 0
                if export_dir:
                    size += await self._write(Path(export_dir), None, "export", self._export_dtype)
                if state_dir:
                    own = {
                        "format": 1,
                        "ranks": self.world,
                        "zero_stage": self.facts["zero_stage"],
                        "dtype": self.facts["dtype"],
                        "policy_version": self.version,
                        "optimizer_steps": self.optimizer_steps,
                    }
                    size += await self._write(Path(state_dir), given | {MANIFEST_KEY: own}, "save_state")
                return time.monotonic() - began, size

        return await _uninterrupted(work())

    async def load(self, state_dir: str, version: str, traceparent: str = "") -> tuple[str, int]:
        """Loads a resume state and names its weights; without a folder only names the initial weights.

        Returns:
            The manifest as JSON ("" without a folder), and the optimiser steps made so far.

        Raises:
            BadInputError: the folder holds no whole resume state, or one of other ranks, stage or precision.
            RankFailedError: without a folder, but the weights are not the initial ones any more. The ranks have no way
                back to those, so that the trainer must be started again.
        """
        if not version:
            raise BadInputError("a load needs the version that the weights are given", role="trainer")

        async def work() -> tuple[str, int]:
            async with self._span("trainer.load", traceparent, **{"nightshift.policy_version": version}):
                if not state_dir:
                    if self.optimizer_steps:
                        error = RankFailedError(
                            f"the ranks hold {self.version!r}, {self.optimizer_steps} steps away from the initial "
                            f"weights that {version!r} asks for, and have those no more",
                            role="trainer",
                            fix="Name a resume state, or start the trainer again",
                        )
                        self._ranks.give_up(error)
                        raise error
                    await self._ranks.call("discard")
                    self._reset(version)
                    return "", 0
                folder = Path(state_dir)
                manifest = read_manifest(folder)
                self._check_fit(folder, manifest)
                self.optimizer_steps = (await self._ranks.call("load_state", str(folder)))[0]
                self._reset(version)
                return json.dumps(manifest), self.optimizer_steps

        return await _uninterrupted(work())

    async def _update(self, call: UpdateCall) -> UpdateAnswer:
        attributes = {
            "nightshift.step": call.key.step,
            "nightshift.attempt": call.key.attempt,
            "nightshift.part": call.key.part,
            "nightshift.final": call.final,
            "nightshift.policy_version": call.new_version,
        }
        async with self._span("trainer.update", call.traceparent, **attributes):
            earlier = self._log.answer_to(call.key)
            if earlier is not None:
                return replace(earlier, repeated=True)
            began = time.monotonic()
            spec, samples = unpack_loss(call.loss), unpack_samples(call.samples)
            check_loss_spec(spec)
            check_samples(samples, spec, self.facts["vocab_size"], self.facts["max_positions"])
            discard = self._log.admit(call.key, call.expect_version, call.new_version)
            try:
                if call.key.part == 0:
                    self._batch = _new_batch(spec)
                answer = await self._take(call, spec, trained(samples), discard, began)
            except BaseException:
                self._log.abandoned()
                raise
            if call.final:
                self._log.applied(call.key, answer)
                self._batch = None
            else:
                self._log.added(call.key, answer)
            return answer

    async def _take(
        self, call: UpdateCall, spec: LossSpec, kept: Sequence[Any], discard: bool, began: float
    ) -> UpdateAnswer:
        batch = self._batch
        if batch is None:
            raise RoleError(f"{call.key} has no batch", role="trainer")
        _check_same_loss(batch.spec, spec)
        if kept:
            args = (call.samples, call.loss, batch.early_divisor or 1.0, discard)
            for sums in await self._ranks.call("accumulate", *args):
                batch.sums = batch.sums + sums
        elif discard:
            await self._ranks.call("discard")
        batch.tokens += sum(sample.trained_tokens for sample in kept)
        batch.sequences += len(kept)
        metrics: dict[str, float] = {}
        stepped = call.final and batch.tokens > 0
        if call.final:
            total = batch.early_divisor or _divisor(spec, batch)
            metrics = to_metrics(batch.sums, spec, total)
            if stepped:
                applied = await self._ranks.call("apply", 1.0 if batch.early_divisor else total, call.learning_rate)
                metrics |= applied[0]
                self.optimizer_steps += 1
        memory = sum(await self._ranks.call("peak_memory"))
        tensors = (await self._ranks.call("tensors"))[0] if call.debug and kept else []
        return UpdateAnswer(call.final, stepped, metrics, time.monotonic() - began, memory, tensors=tensors)

    async def _log_probs(self, sequences: Sequence[SequenceInput], exact: bool) -> list[SequenceResult]:
        if not sequences:
            return []
        shares = await self._ranks.call("log_probs", codec.pack(list(sequences)), exact)
        return [result for share in shares for result in codec.unpack(share)]

    async def _write(self, target: Path, manifest: dict[str, Any] | None, method: str, *args: Any) -> int:
        partial: Path | None = None
        try:
            partial = temporary(target)
            await self._ranks.call(method, str(partial), *args)
            return await asyncio.to_thread(commit, partial, target, manifest)
        except OSError as error:
            raise RoleError(
                f"cannot write {target}: {error}", role="trainer", fix="Free space there, or lower checkpoint.keep"
            ) from error
        finally:
            if partial is not None and partial.exists():
                shutil.rmtree(partial, ignore_errors=True)

    def _check_fit(self, folder: Path, manifest: dict[str, Any]) -> None:
        own = manifest.get(MANIFEST_KEY, {})
        present = {"ranks": self.world, "zero_stage": self.facts["zero_stage"], "dtype": self.facts["dtype"]}
        for name, value in present.items():
            if own.get(name) != value:
                raise BadInputError(
                    f"the resume state {folder} was written with trainer.{name} {own.get(name)}, "
                    f"this trainer has {value}",
                    role="trainer",
                    fix=f"Set trainer.{name} to {own.get(name)}",
                )

    def _expect(self, version: str) -> None:
        if version != self.version:
            raise VersionConflictError(
                f"the weights have version {self.version!r}, the call is about {version!r}", role="trainer"
            )

    def _reset(self, version: str) -> None:
        self._log.reset(version)
        self._batch = None
        self._published, self.sender.version = None, ""

    def _finished(self, key: PartKey, task: asyncio.Task[UpdateAnswer]) -> None:
        self._running.pop(key, None)
        # Read here, since a caller that went away does not.
        if not task.cancelled():
            task.exception()

    @asynccontextmanager
    async def _span(self, name: str, traceparent: str, **attributes: Any) -> AsyncIterator[None]:
        """Waits for the call's turn, then opens a span in the caller's trace."""
        parent = context_from(traceparent)
        async with self._turn:
            with self._tracer.start_as_current_span(name, context=parent, attributes=attributes):
                yield


async def _uninterrupted(work: Any) -> Any:
    """Awaits work that goes on when the caller goes away: ranks must not be left in the middle of a call."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_read)
        raise


def _read(task: asyncio.Future[Any]) -> None:
    with suppress(asyncio.CancelledError):
        task.exception()


def _new_batch(spec: LossSpec) -> _Batch:
    known = spec.total_tokens if spec.aggregation == "token_mean" else spec.total_sequences
    return _Batch(spec, _given(spec) if known else 0.0)


def _given(spec: LossSpec) -> float:
    return divisor(spec.aggregation, spec.total_tokens, spec.total_sequences, spec.constant_length)


def _divisor(spec: LossSpec, batch: _Batch) -> float:
    """What a streamed batch is divided by: the totals of its last part, or what was counted where these are absent."""
    tokens, sequences = spec.total_tokens or batch.tokens, spec.total_sequences or batch.sequences
    return divisor(spec.aggregation, tokens, sequences, spec.constant_length)


def _check_same_loss(first: LossSpec, spec: LossSpec) -> None:
    totals_known = bool(first.total_tokens or first.total_sequences)
    ignored = {} if totals_known else {"total_tokens": 0, "total_sequences": 0}
    if replace(spec, **ignored) != replace(first, **ignored):
        raise BadInputError("the parts of one batch have different loss specifications", role="trainer")
