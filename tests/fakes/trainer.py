"""Fake trainer: the toy policy behind the real gRPC contract, with idempotent updates and folders by rename."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from nightshift.wire import codec
from nightshift.wire.experience import LossSpec, Sample, unpack_loss, unpack_samples
from nightshift.wire.v1 import trainer_pb2, trainer_pb2_grpc
from tests.fakes import policy
from tests.fakes.faults import Faults
from tests.fixtures.tokenizer_k import MAX_POSITIONS, VOCAB_SIZE

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]


@dataclass
class Update:
    """One update that was applied."""

    step: int
    attempt: int
    expect: str
    new: str
    samples: list[Sample]
    loss: LossSpec
    learning_rate: float
    stepped: bool
    context: Any
    weights: np.ndarray  # [V] after it
    parts: list[int]  # samples of each part


@dataclass
class Open:
    """An attempt that parts are added to."""

    step: int
    attempt: int
    parts: list[list[Sample]] = field(default_factory=list)


class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """One trainer.

    Faults by method name: ``rank_died``, ``unavailable``, ``cancel``, ``internal``, ``lose_answer`` (the work is done,
    its answer is lost), ``hang``, ``slow`` (``delay``), and of Save ``half`` (dies before the folder is complete).
    Like the real one it has no way back to the initial weights once it made a step: asked for them, it gives up.

    Args:
        store: folder of published weights.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.faults = Faults()
        self.backend = "safetensors"  # that each publication says of itself
        self.changed_fraction = 1.0  # of the weights, that each publication says of itself
        self.weights = policy.base_bias()
        self.version = ""
        self.optimizer_steps = 0
        self.updates: list[Update] = []
        self.repeated = 0
        self.received: list[tuple[int, int, int]] = []  # (step, attempt, part) of each part that was taken
        self.parts: list[int] = []  # samples of each part of the last update
        self.abandoned: list[tuple[int, int]] = []  # (step, attempt) of each attempt that came to nothing
        self.saves: list[str] = []
        self.published: list[str] = []
        self.contexts: list[Any] = []
        self.saving = asyncio.Event()
        self.incarnation = 1
        self.replaced: Callable[[], Coroutine[Any, Any, None]] | None = None  # what an agent does for one that gave up
        self.gave_up: asyncio.Task[None] | None = None
        self.port = 0
        self._answers: dict[tuple[int, int, int, str], Any] = {}
        self._open: Open | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens, on the port that it had before."""
        server = grpc.aio.server(options=_OPTIONS)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Goes away; calls in progress are lost, weights stay."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def die(self) -> None:
        """Goes away for good, with its weights."""
        await self.stop()
        self.weights, self.version, self.optimizer_steps = policy.base_bias() + 1.0, "", 0
        self._answers, self._open = {}, None

    async def start_again(self) -> None:
        """Starts as another process would: on another port, with the model's own weights."""
        self.port, self.incarnation, self.gave_up = 0, self.incarnation + 1, None
        self.weights = policy.base_bias()
        await self.start()

    @property
    def url(self) -> str:
        """Address for services.json."""
        return f"grpc://127.0.0.1:{self.port}"

    async def Describe(self, request: Any, context: Any) -> Any:
        """What answers here."""
        return trainer_pb2.DescribeTrainerResponse(
            model="toy",
            dtype="float32",
            incarnation=str(self.incarnation),
            ranks=1,
            parameters=VOCAB_SIZE,
            vocab_size=VOCAB_SIZE,
            policy_version=self.version,
            optimizer_steps=self.optimizer_steps,
            max_positions=MAX_POSITIONS,
        )

    async def Load(self, request: Any, context: Any) -> Any:
        """Base weights, or those of a resume state."""
        self.contexts.append(request.context)
        manifest = ""
        if not request.state_dir and self.optimizer_steps:
            if self.replaced is not None and self.gave_up is None:
                self.gave_up = asyncio.create_task(self.replaced())
            await context.abort(grpc.StatusCode.UNAVAILABLE, "[trainer] the ranks have the initial weights no more")
        self.weights, self.optimizer_steps = policy.base_bias(), 0
        if request.state_dir:
            folder = Path(request.state_dir)
            self.weights = np.load(folder / "bias.npy", allow_pickle=False)
            manifest = (folder / "manifest.json").read_text()
            self.optimizer_steps = json.loads(manifest)["trainer"]["optimizer_steps"]
        self.version = request.policy_version
        self._answers, self._open = {}, None
        return trainer_pb2.LoadResponse(manifest=manifest, optimizer_steps=self.optimizer_steps)

    async def Update(self, request: Any, context: Any) -> Any:
        """One optimiser step of plain policy gradient with a KL term's pull towards the reference left out."""
        self.contexts.append(request.context)
        fault = await self._fault("Update", context)
        key = (request.step, request.attempt, request.part, request.new_version)
        if key in self._answers:
            self.repeated += 1
            answer = trainer_pb2.UpdateResponse()
            answer.CopyFrom(self._answers[key])
            answer.repeated = True
            return answer
        if request.expect_version != self.version:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"holds {self.version!r}, not {request.expect_version!r}"
            )
        began = time.time()
        opened = self._open
        if opened is None or (opened.step, opened.attempt) != (request.step, request.attempt):
            self._abandon()
            opened = self._open = Open(request.step, request.attempt)
        if request.part != len(opened.parts):
            await context.abort(grpc.StatusCode.ABORTED, f"part {request.part}, expected {len(opened.parts)}")
        samples = self._read(request.samples)
        await self._work(samples, request.final)
        opened.parts.append(samples)
        self.received.append(key[:3])
        if request.final:
            self._open = None
            samples = [sample for part in opened.parts for sample in part]
            self.parts = [len(part) for part in opened.parts]
            answer = self._apply(request, samples, unpack_loss(request.loss))
        else:
            answer = trainer_pb2.UpdateResponse(applied=False)
        if request.debug and samples:
            told = {"role": "trainer", "name": "logprobs", "shape": [len(samples)], "dtype": "float32", "device": "cpu"}
            answer.tensors = codec.pack([told])
        answer.seconds = time.time() - began
        self._answers = {known: value for known, value in self._answers.items() if known[0] == request.step}
        self._answers[key] = answer
        if fault == "lose_answer":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return answer

    async def Loss(self, request: Any, context: Any) -> Any:
        """The loss of a batch under the weights as they are."""
        self.contexts.append(request.context)
        await self._fault("Loss", context)
        if request.context.policy_version != self.version:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"holds {self.version!r}")
        samples = [sample for sample in unpack_samples(request.samples) if sample.trained_tokens]
        loss = unpack_loss(request.loss)
        metrics = {"loss/actor": self._loss(samples, loss)} if samples else {}
        return trainer_pb2.LossResponse(metrics=metrics, seconds=0.001)

    def _loss(self, samples: list[Sample], loss: LossSpec) -> float:
        """Minus the advantages weighed by pi/mu, over the trained tokens."""
        total = 0.0
        for sample in samples:
            held = policy.score(self.weights, sample.prompt_ids, sample.response_ids, loss.temperature)
            terms = np.exp(held - sample.logprobs) * sample.advantages
            total -= float(terms[sample.loss_mask > 0].sum())
        return total / max(1, loss.total_tokens)

    async def Publish(self, request: Any, context: Any) -> Any:
        """Writes the weights and scores the probe."""
        self.contexts.append(request.context)
        await self._fault("Publish", context)
        if request.policy_version != self.version:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"holds {self.version!r}")
        name = request.policy_version.replace("/", "_") + ".npy"
        self._write(self.store / name)
        self.published.append(request.policy_version)
        probe = [
            {"id": item["id"], "logprobs": policy.score(self.weights, item["prompt_ids"], item["response_ids"])}
            for item in codec.unpack(request.probe)
        ]
        return trainer_pb2.PublishResponse(
            backend=self.backend,
            update_info=codec.pack({"path": name}),
            digest="0" * 64,
            bytes=self.weights.nbytes,
            probe=codec.pack(probe),
            seconds=0.001,
            changed_fraction=self.changed_fraction,
        )

    async def Save(self, request: Any, context: Any) -> Any:
        """Writes the export, then the resume state; each appears by rename."""
        self.contexts.append(request.context)
        self.saving.set()
        fault = await self._fault("Save", context)
        manifest = json.loads(request.manifest) | {
            "trainer": {"optimizer_steps": self.optimizer_steps, "policy_version": self.version},
        }
        if request.export_dir:
            self._folder(Path(request.export_dir), {"config.json": "{}"})
        if fault == "half":
            half = Path(request.state_dir).with_suffix(".tmp-half")
            half.mkdir(parents=True)
            np.save(half / "bias.npy", self.weights, allow_pickle=False)
            await asyncio.sleep(3600)
        if request.state_dir:
            self._folder(Path(request.state_dir), {"manifest.json": json.dumps(manifest)})
            self.saves.append(request.state_dir)
        return trainer_pb2.SaveResponse(seconds=0.001, bytes=self.weights.nbytes)

    def _read(self, data: bytes) -> list[Sample]:
        """The samples of a request."""
        return unpack_samples(data)

    async def _work(self, samples: list[Sample], final: bool) -> None:
        """Takes the time that a part needs: none."""

    def _abandon(self) -> None:
        if self._open is not None:
            self.abandoned.append((self._open.step, self._open.attempt))
        self._open = None

    async def _fault(self, method: str, context: Any) -> str:
        fault = self.faults.take(method)
        kind = fault.kind if fault else ""
        if fault and kind in ("slow", "hang"):
            await asyncio.sleep(fault.delay or 3600)
        if kind == "unavailable":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "planned absence")
        if kind == "rank_died":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "[trainer] rank 0 died during update: its process ended")
        if kind == "cancel":
            await context.abort(grpc.StatusCode.CANCELLED, "the server goes down")
        if kind == "internal":
            if method == "Update":
                self._abandon()
            await context.abort(grpc.StatusCode.INTERNAL, "planned failure: no space left on device")
        return kind

    def _apply(self, request: Any, samples: list[Sample], loss: LossSpec) -> Any:
        trained = [sample for sample in samples if sample.trained_tokens]
        total = np.zeros_like(self.weights)
        ratios: list[float] = []
        value = self._loss(trained, loss)
        for sample in trained:
            held = policy.score(self.weights, sample.prompt_ids, sample.response_ids, loss.temperature)
            ratios += np.abs(held - sample.logprobs)[sample.loss_mask > 0].tolist()
            advantages = np.where(sample.loss_mask > 0, sample.advantages, 0.0)
            if loss.kl_coef:
                advantages = advantages - loss.kl_coef * (held - sample.ref_logprobs)
            total += policy.gradient(self.weights, sample.prompt_ids, sample.response_ids, advantages, loss.temperature)
        stepped = bool(trained)
        if stepped:
            total /= max(1, loss.total_tokens)
            self.weights = self.weights + request.learning_rate * total
            self.optimizer_steps += 1
        self.version = request.new_version
        self.updates.append(
            Update(
                request.step,
                request.attempt,
                request.expect_version,
                request.new_version,
                samples,
                loss,
                request.learning_rate,
                stepped,
                request.context,
                self.weights.copy(),
                self.parts,
            )
        )
        metrics = {"tokens": float(len(ratios)), "sequences": float(len(trained))}
        if stepped:
            metrics |= {
                "loss/actor": value,
                "grad_norm": float(np.linalg.norm(total)),
                "lr": request.learning_rate,
                "log_ratio/abs_mean": float(np.mean(ratios)),
            }
        return trainer_pb2.UpdateResponse(
            applied=True, stepped=stepped, metrics=metrics, seconds=0.001, peak_memory_bytes=1 << 20
        )

    def _write(self, path: Path) -> None:
        part = path.with_suffix(".tmp")
        with part.open("wb") as file:
            np.save(file, self.weights, allow_pickle=False)
        part.replace(path)

    def _folder(self, folder: Path, files: dict[str, str]) -> None:
        part = folder.with_name(f"{folder.name}.tmp-{time.monotonic_ns()}")
        part.mkdir(parents=True)
        np.save(part / "bias.npy", self.weights, allow_pickle=False)
        for name, text in files.items():
            (part / name).write_text(text)
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)


class AnsweringTrainer(FakeTrainer):
    """Also answers LogProbs, which V-trace and the evaluation of preference pairs ask for."""

    async def LogProbs(self, request: Any, context: Any) -> Any:
        """Log-probs under the present weights."""
        results = [
            {
                "id": item["id"],
                "logprobs": policy.score(self.weights, item["prompt_ids"], item["response_ids"], item["temperature"]),
            }
            for item in codec.unpack(request.samples)
        ]
        return trainer_pb2.LogProbsResponse(results=codec.pack(results), seconds=0.001)
