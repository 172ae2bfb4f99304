"""The Serve replicas: ScorerService's methods around a reward pool or a reference model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry import trace

from nightshift.wire import codec, listen, telemetry
from nightshift.wire.diagnose import translate
from nightshift.wire.errors import RoleError, WireError
from nightshift.wire.trace import TraceContext
from nightshift.wire.v1 import scorer_pb2
from services.scorers import ingress
from services.scorers.memory import peak_memory_bytes
from services.scorers.reward_pool import RewardPool

_log = logging.getLogger(__name__)
_FLUSH_S = 2.0


class Replica:
    """What all scorers share: decoding, a span per call, and one sentence for each error.

    Args:
        role: "reward", "reference" or "critic".
        span: name of the span of one Score call.
        otlp: OTLP/gRPC endpoint for the spans, or None.
        run_id: the run that this scorer belongs to.
    """

    def __init__(self, role: str, span: str, otlp: str | None, run_id: str) -> None:
        self._role = role
        self._span = span
        self._incarnation = uuid.UUID(bytes=os.urandom(16)).hex
        self._tracer = telemetry.setup(role, otlp, run_id)
        ingress.bind_replica_to_loopback()

    async def Score(self, request: Any, grpc_context: Any) -> Any:
        """ScorerService.Score; INVALID_ARGUMENT for a malformed request, INTERNAL for everything else."""
        began = time.perf_counter()
        if self._refused(grpc_context):
            return scorer_pb2.ScoreResponse()
        attributes = {
            telemetry.RUN_ID: request.context.run_id,
            "nightshift.policy_version": request.context.policy_version,
            "nightshift.job_trace_id": request.context.job_trace_id,
        }
        parent = telemetry.context_from(request.context.traceparent)
        links = [telemetry.link_to(other.trace_id, other.span_id) for other in _contexts(request.linked)]
        with self._tracer.start_as_current_span(self._span, parent, attributes=attributes, links=links) as span:
            try:
                samples = codec.unpack(request.samples)
                if not isinstance(samples, list):
                    raise WireError(f"expected a list of samples, got {type(samples).__name__}")
                span.set_attribute("nightshift.samples", len(samples))
                results = await self._score(samples, codec.unpack(request.weights) if request.weights else None)
                if len(results) != len(samples):
                    raise RoleError(f"{len(results)} results for {len(samples)} samples", role=self._role)
                packed = _pack(results, self._role)
            except WireError as error:
                return self._fail(span, grpc_context, grpc.StatusCode.INVALID_ARGUMENT, error.message)
            except Exception as error:
                _log.exception("[%s] a call failed", self._role)
                message = translate(error, role=self._role).message
                return self._fail(span, grpc_context, grpc.StatusCode.INTERNAL, message)
            self._annotate(span, results)
        return scorer_pb2.ScoreResponse(
            results=packed, seconds=time.perf_counter() - began, peak_memory_bytes=self._peak_memory()
        )

    async def Describe(self, request: Any, grpc_context: Any) -> Any:
        """ScorerService.Describe."""
        if self._refused(grpc_context):
            return scorer_pb2.DescribeResponse()
        return scorer_pb2.DescribeResponse(role=self._role, incarnation=self._incarnation, **self._describe())

    async def _score(self, samples: list[Any], weights: Any) -> Sequence[Any]:
        """Results in the order of the samples; ``weights`` is what the call names, for a model that changes."""
        raise NotImplementedError

    def _describe(self) -> dict[str, Any]:
        raise NotImplementedError

    def _annotate(self, span: trace.Span, results: Sequence[Any]) -> None:
        """Adds what the results say to the span."""

    def _peak_memory(self) -> int:
        return peak_memory_bytes()

    def _refused(self, grpc_context: Any) -> bool:
        """Whether a call lacks the run's token, where the scorer works for another host; the call is answered then."""
        if listen.allowed(grpc_context.invocation_metadata()):
            return False
        grpc_context.set_code(grpc.StatusCode.UNAUTHENTICATED)
        grpc_context.set_details(f"[{self._role}] the call lacks the run's token")
        return True

    def _fail(self, span: trace.Span, grpc_context: Any, code: grpc.StatusCode, message: str) -> Any:
        sentence = f"[{self._role}] {' '.join(message.split())}"[:1000]
        span.set_status(trace.Status(trace.StatusCode.ERROR, sentence))
        grpc_context.set_code(code)
        grpc_context.set_details(sentence)
        return scorer_pb2.ScoreResponse()

    def _close(self) -> None:
        telemetry.shutdown(_FLUSH_S)

    def __del__(self) -> None:  # what Serve calls when it ends a replica
        self._close()


def _contexts(traceparents: Iterable[str]) -> Iterator[TraceContext]:
    """Those that can be read: a broken header costs its link, never the call."""
    for text in traceparents:
        with contextlib.suppress(WireError):
            yield TraceContext.from_traceparent(text)


def _pack(results: Sequence[Any], role: str) -> bytes:
    try:
        return codec.pack(list(results))
    except WireError as error:  # ours, not the caller's
        raise RoleError(error.message, role=role) from error


class RewardReplica(Replica):
    """A reward function in worker processes of this replica; user code never runs in the replica itself."""

    def __init__(
        self,
        function: str,
        workers: int,
        timeout_s: float,
        start_timeout_s: float,
        otlp: str | None,
        run_id: str,
        batched: bool = False,
    ) -> None:
        super().__init__("reward", "reward.score", otlp, run_id)
        self._batched = batched
        self._pool = RewardPool(function, workers=workers, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
        self._pool.start()

    async def check_health(self) -> None:
        """Serve's health check: a pool whose thread has ended makes Serve start another replica."""
        if not self._pool.alive:
            raise RoleError("the worker pool has ended", role="reward")

    async def _score(self, samples: list[Any], weights: Any) -> Sequence[Any]:
        for index, sample in enumerate(samples):
            if not isinstance(sample, dict):
                raise WireError(f"sample {index} is a {type(sample).__name__}, expected a map")
            for key in ("id", "response"):
                if not isinstance(sample.get(key), str):
                    raise WireError(f"sample {index}: {key!r} is {type(sample.get(key)).__name__}, expected a text")
        # The pool keeps each sample's limit itself; a caller that goes away must not lose the others' results.
        submit = self._pool.submit_batch if self._batched else self._pool.submit
        return await asyncio.wrap_future(submit(samples))

    def _annotate(self, span: trace.Span, results: Sequence[Any]) -> None:
        span.set_attribute("nightshift.unscored", sum(result["score"] is None for result in results))

    def _describe(self) -> dict[str, Any]:
        return {"model": f"{self._pool.path}:{self._pool.name}"}

    def _peak_memory(self) -> int:
        return peak_memory_bytes() + self._pool.peak_memory_bytes

    def _close(self) -> None:
        if pool := getattr(self, "_pool", None):
            pool.close()
        super()._close()


class ReferenceReplica(Replica):
    """A frozen model: the reference, or the teacher. One thread computes; further calls wait for it here."""

    def __init__(
        self,
        path: str,
        dtype: str,
        micro_batch_size: int,
        threads: int,
        attn_implementation: str,
        device: str,
        otlp: str | None,
        run_id: str,
        role: str = "reference",
    ) -> None:
        super().__init__(role, f"{role}.log_probs", otlp, run_id)
        # Read by OpenMP when torch is imported, in the next line.
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        from services.scorers.reference import ReferenceModel

        # torch's number of threads belongs to the thread that sets it, so that the one that loads also computes.
        self._thread = ThreadPoolExecutor(1, "reference")
        self._model = self._thread.submit(
            ReferenceModel,
            path,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            threads=threads,
            attn_implementation=attn_implementation,
            device=device,
        ).result()

    async def _score(self, samples: list[Any], weights: Any) -> Sequence[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._model.score, samples)

    def _describe(self) -> dict[str, Any]:
        return {"model": self._model.path, "dtype": self._model.dtype, "vocab_size": self._model.vocab_size}

    def _close(self) -> None:
        if thread := getattr(self, "_thread", None):
            thread.shutdown(wait=False, cancel_futures=True)
        super()._close()


class CriticReplica(Replica):
    """The critic that is being trained. One thread computes and loads weights; further calls wait for it here."""

    def __init__(
        self,
        path: str,
        store: str,
        dtype: str,
        micro_batch_size: int,
        threads: int,
        attn_implementation: str,
        device: str,
        otlp: str | None,
        run_id: str,
    ) -> None:
        super().__init__("critic", "critic.values", otlp, run_id)
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        from services.scorers.critic import CriticModel

        self._thread = ThreadPoolExecutor(1, "critic")
        self._model = self._thread.submit(
            CriticModel,
            path,
            store,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            threads=threads,
            attn_implementation=attn_implementation,
            device=device,
        ).result()

    async def _score(self, samples: list[Any], weights: Any) -> Sequence[Any]:
        def work() -> Sequence[Any]:
            self._model.take(weights)
            return self._model.score(samples)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _describe(self) -> dict[str, Any]:
        return {"model": self._model.path, "dtype": self._model.dtype, "vocab_size": self._model.vocab_size}

    def _close(self) -> None:
        if thread := getattr(self, "_thread", None):
            thread.shutdown(wait=False, cancel_futures=True)
        super()._close()


class BuiltinRewardReplica(Replica):
    """A reward that comes with the project: classifier, embedding, judge or code.

    Args:
        kind: its ``type`` in the job file.
        settings: its other keys there.
        device: "auto", "cpu" or "cuda".
    """

    def __init__(self, kind: str, settings: dict[str, Any], device: str, otlp: str | None, run_id: str) -> None:
        super().__init__("reward", "reward.score", otlp, run_id)
        self._kind, self._settings = kind, settings
        threads = str(settings.get("threads", 1))
        os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
        self._thread = ThreadPoolExecutor(1, "reward")
        # A judge only waits for the network, in the replica's own loop.
        self._scorer = (
            _scorer(kind, settings, device)
            if kind == "judge"
            else self._thread.submit(_scorer, kind, settings, device).result()
        )

    async def _score(self, samples: list[Any], weights: Any) -> Sequence[Any]:
        for index, sample in enumerate(samples):
            if not isinstance(sample, dict) or not isinstance(sample.get("response"), str):
                raise WireError(f"sample {index} is no map with a text 'response'")
        if self._kind == "judge":
            graded: Sequence[Any] = await self._scorer.score(samples)
            return graded
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._scorer.score, samples)

    def _annotate(self, span: trace.Span, results: Sequence[Any]) -> None:
        span.set_attribute("nightshift.unscored", sum(result["score"] is None for result in results))

    def _describe(self) -> dict[str, Any]:
        return {"model": str(self._settings.get("model") or self._kind)}

    def _close(self) -> None:
        if thread := getattr(self, "_thread", None):
            thread.shutdown(wait=False, cancel_futures=True)
        super()._close()


def _scorer(kind: str, settings: dict[str, Any], device: str) -> Any:
    if kind == "judge":
        from services.scorers.judge import JudgeScorer

        return JudgeScorer(settings)
    if kind == "code":
        from services.scorers.sandbox import CodeScorer

        return CodeScorer(settings)
    from services.scorers.model_rewards import ClassifierScorer, EmbeddingScorer

    return ClassifierScorer(settings, device) if kind == "classifier" else EmbeddingScorer(settings, device)
