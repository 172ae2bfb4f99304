"""Fake scorers: one gRPC ingress with a reward and the reference, deterministic functions of the ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from nightshift.wire import codec
from nightshift.wire.v1 import scorer_pb2, scorer_pb2_grpc
from tests.fakes import policy
from tests.fakes.faults import Faults
from tests.fixtures.tokenizer_k import VOCAB_SIZE

REFERENCE = "reference"
Results = list[dict[str, Any]]


@dataclass
class Scoring:
    """One call that was received."""

    time: float
    application: str
    traceparent: str  # of the call's metadata
    context: Any
    linked: list[str]
    samples: list[dict[str, Any]] = field(default_factory=list)
    fault: str = ""

    @property
    def sample_ids(self) -> list[str]:
        """Samples of the call, in order."""
        return [sample["id"] for sample in self.samples]

    @property
    def traces(self) -> set[str]:
        """Trace ids that the call carries."""
        return {text.split("-")[1] for text in (self.traceparent, *self.linked) if text}


class FakeScorers(scorer_pb2_grpc.ScorerServiceServicer):
    """Rewards and reference behind one address.

    Faults by application: ``unavailable``, ``cancel``, ``internal``, ``refuse``, ``slow`` (``delay``), ``hang``,
    ``count`` (one result too few), ``order`` (reversed), ``garbage``, ``unscored`` (the first sample of the call),
    ``not_finite``, ``huge``, ``other_group`` (ids of another group), ``no_maps``, ``no_parts`` (neither is a map);
    of the reference ``short`` (one value too few), ``nan``, ``positive``, ``no_ids`` (the echo is none).

    Attributes:
        reward: score of a sample, from the map of RewardInput.
        perturb: changes the results of an application.
        calls: every call that was received.
    """

    def __init__(self) -> None:
        self.reward: Callable[[dict[str, Any]], float | None] = lambda sample: policy.reward_of(sample["response_ids"])
        self.perturb: Callable[[str, Results], Results] = lambda _application, results: results
        self.faults = Faults()
        self.calls: list[Scoring] = []
        self.keep = True  # whether calls are written down
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens, on the port that it had before."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        scorer_pb2_grpc.add_ScorerServiceServicer_to_server(self, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Goes away; calls in progress are lost."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    @property
    def url(self) -> str:
        """Address for services.json."""
        return f"grpc://127.0.0.1:{self.port}"

    async def Describe(self, request: Any, context: Any) -> Any:
        """What answers here."""
        application = dict(context.invocation_metadata()).get("application", "")
        return scorer_pb2.DescribeResponse(
            role=application.split("-")[0],
            model="toy",
            dtype="float32",
            incarnation="fake",
            vocab_size=VOCAB_SIZE if application == REFERENCE else 0,
        )

    async def Score(self, request: Any, context: Any) -> Any:
        """Scores a batch."""
        began = time.time()
        metadata = dict(context.invocation_metadata())
        application = metadata.get("application", "")
        call = Scoring(began, application, metadata.get("traceparent", ""), request.context, list(request.linked))
        call.samples = codec.unpack(request.samples)
        if self.keep:
            self.calls.append(call)
        fault = self.faults.take(application, call)
        call.fault = fault.kind if fault else ""
        match call.fault:
            case "unavailable":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "planned absence")
            case "cancel":
                await context.abort(grpc.StatusCode.CANCELLED, "the server goes down")
            case "internal":
                await context.abort(grpc.StatusCode.INTERNAL, "planned failure")
            case "refuse":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "planned refusal")
            case "slow" | "hang":
                await asyncio.sleep(fault.delay if fault and fault.delay else 3600)
        await self._work(len(call.samples))
        results = self.perturb(application, [self._one(application, sample) for sample in call.samples])
        if results and "logprobs" in results[0]:  # a model says what its first pass was made of
            results[0]["tensors"] = [{"name": "logits", "shape": [1, 2, 3], "dtype": "float32", "device": "cpu"}]
        return scorer_pb2.ScoreResponse(
            results=b"\xc1" if call.fault == "garbage" else codec.pack(_spoil(results, call.fault)),
            seconds=time.time() - began,
            peak_memory_bytes=1 << 20,
        )

    async def _work(self, samples: int) -> None:
        """Takes the time that so many samples need: none."""

    def _one(self, application: str, sample: dict[str, Any]) -> dict[str, Any]:
        if application == REFERENCE:
            values = policy.score(
                policy.base_bias(), sample["prompt_ids"], sample["response_ids"], sample.get("temperature", 1.0)
            )
            return {"id": sample["id"], "logprobs": values, "token_ids": sample["response_ids"]}
        score = self.reward(sample)
        cause = {"error_type": "", "error": ""} if score is not None else {"error_type": "none", "error": "no score"}
        return {"id": sample["id"], "score": score, "parts": {}, "seconds": 0.0, **cause}


def _spoil(results: Results, fault: str) -> Results:
    match fault:
        case "count":
            return results[:-1]
        case "order":
            return results[::-1]
        case "unscored":
            results[0] |= {"score": None, "error_type": "raised", "error": "ZeroDivisionError: division by zero"}
        case "not_finite":
            results[0]["score"] = float("nan")
        case "huge":
            results[0]["score"] = 1e300
        case "other_group":
            return [result | {"id": "g9999999." + str(result["id"]).partition(".")[2]} for result in results]
        case "no_maps":
            return [0.5 for _ in results]  # type: ignore[misc]
        case "no_parts":
            results[0]["parts"] = 7
        case "no_ids":
            results[0]["token_ids"] = 7
        case "positive":
            results[0]["logprobs"] = -results[0]["logprobs"] + np.float32(0.1)
        case "short":
            results[0]["logprobs"] = results[0]["logprobs"][:-1]
        case "nan":
            results[0]["logprobs"] = results[0]["logprobs"] * np.float32("nan")
    return results
