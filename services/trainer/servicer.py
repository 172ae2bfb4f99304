"""TrainerService over gRPC: messages in, messages out, errors as status codes."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from nightshift.wire import codec, listen
from nightshift.wire.diagnose import translate
from nightshift.wire.errors import (
    BadInputError,
    NightshiftError,
    RoleTimeoutError,
    VersionConflictError,
    WireError,
)
from nightshift.wire.scoring import SequenceInput
from nightshift.wire.v1 import trainer_pb2, trainer_pb2_grpc
from services.trainer.checks import NonFiniteGradientError
from services.trainer.coordinator import Coordinator, RankFailedError, UpdateCall
from services.trainer.updates import OrderError, PartKey

_log = logging.getLogger(__name__)
#: First match wins.
_CODES: tuple[tuple[type[NightshiftError], grpc.StatusCode], ...] = (
    (RankFailedError, grpc.StatusCode.UNAVAILABLE),
    (VersionConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (OrderError, grpc.StatusCode.ABORTED),  # a new attempt may succeed
    (NonFiniteGradientError, grpc.StatusCode.OUT_OF_RANGE),  # a new attempt would end in the same way
    (RoleTimeoutError, grpc.StatusCode.UNAVAILABLE),
    (BadInputError, grpc.StatusCode.INVALID_ARGUMENT),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
)
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
]


def status_code(error: Exception) -> grpc.StatusCode:
    """The gRPC status of an error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the run's token, where the trainer works for another host."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Passes a call on, or answers it with UNAUTHENTICATED."""
        if listen.allowed(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "[trainer] the call lacks the run's token")


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers calls with what a coordinator does."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Describe(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """What answers here, without waiting for a running call."""
        trainer, facts = self._coordinator, self._coordinator.facts
        return trainer_pb2.DescribeTrainerResponse(
            model=str(facts["model"]),
            dtype=facts["dtype"],
            incarnation=trainer.incarnation,
            ranks=trainer.world,
            parameters=facts["parameters"],
            vocab_size=facts["vocab_size"],
            policy_version=trainer.version,
            optimizer_steps=trainer.optimizer_steps,
            max_positions=facts["max_positions"],
            parallelisms=["data"],
        )

    async def LogProbs(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Log-probs of given tokens."""

        async def work() -> Any:
            began = time.monotonic()
            results = await self._coordinator.log_probs(
                _sequences(request.samples), request.context.policy_version, request.context.traceparent
            )
            return trainer_pb2.LogProbsResponse(results=codec.pack(results), seconds=time.monotonic() - began)

        return await _answer(context, work)

    async def Loss(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The loss of a batch, before its update or without one."""

        async def work() -> Any:
            began, asked = time.monotonic(), request.context
            metrics = await self._coordinator.loss(
                request.samples, request.loss, asked.policy_version, asked.traceparent
            )
            return trainer_pb2.LossResponse(metrics=metrics, seconds=time.monotonic() - began)

        return await _answer(context, work)

    async def Update(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """A part of an update."""
        call = UpdateCall(
            key=PartKey(request.step, request.attempt, request.part),
            expect_version=request.expect_version,
            new_version=request.new_version,
            final=request.final,
            samples=request.samples,
            loss=request.loss,
            learning_rate=request.learning_rate,
            traceparent=request.context.traceparent,
            debug=request.debug,
        )

        async def work() -> Any:
            answer = await self._coordinator.update(call)
            return trainer_pb2.UpdateResponse(
                applied=answer.applied,
                repeated=answer.repeated,
                stepped=answer.stepped,
                metrics=answer.metrics,
                seconds=answer.seconds,
                peak_memory_bytes=answer.peak_memory_bytes,
                tensors=codec.pack(answer.tensors) if answer.tensors else b"",
            )

        return await _answer(context, work)

    async def Publish(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Weights into the store."""

        async def work() -> Any:
            answer = await self._coordinator.publish(
                request.policy_version, _sequences(request.probe), request.context.traceparent
            )
            return trainer_pb2.PublishResponse(
                backend=answer.backend,
                update_info=codec.pack(answer.update_info),
                digest=answer.digest,
                bytes=answer.bytes,
                probe=codec.pack(answer.probe),
                seconds=answer.seconds,
                changed_fraction=answer.changed_fraction,
            )

        return await _answer(context, work)

    async def OpenLink(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """A communicator with one server."""

        async def work() -> Any:
            info = await self._coordinator.sender.open(request.server, request.world_size, request.by_store)
            return trainer_pb2.OpenLinkResponse(init_info=codec.pack(info))

        return await _answer(context, work)

    async def JoinLink(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Joins it; given up where the caller goes away."""

        async def work() -> Any:
            seconds = await self._coordinator.sender.join(request.server, request.timeout_s)
            return trainer_pb2.JoinLinkResponse(seconds=seconds)

        return await _answer(context, work)

    async def SendWeights(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Published weights over it; given up where the caller goes away."""

        async def work() -> Any:
            version = request.context.policy_version
            seconds = await self._coordinator.sender.send(request.server, version, request.timeout_s)
            return trainer_pb2.SendWeightsResponse(seconds=seconds)

        return await _answer(context, work)

    async def Save(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Resume state, HF export, or both."""

        async def work() -> Any:
            seconds, size = await self._coordinator.save(
                request.state_dir, request.export_dir, request.manifest, request.context.traceparent
            )
            return trainer_pb2.SaveResponse(seconds=seconds, bytes=size)

        return await _answer(context, work)

    async def Load(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """A resume state, or only the version of the initial weights."""

        async def work() -> Any:
            manifest, steps = await self._coordinator.load(
                request.state_dir, request.policy_version, request.context.traceparent
            )
            return trainer_pb2.LoadResponse(manifest=manifest, optimizer_steps=steps)

        return await _answer(context, work)


async def _answer(context: grpc.aio.ServicerContext, work: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await work()
    except NightshiftError as error:
        await context.abort(status_code(error), str(error))
    except Exception as error:
        _log.exception("a call failed in a way that has no sentence of its own")
        await context.abort(grpc.StatusCode.INTERNAL, str(translate(error, role="trainer")))


def _sequences(data: bytes) -> list[SequenceInput]:
    """Decodes a list of sequences; no bytes are an empty list.

    Raises:
        WireError: malformed message.
    """
    if not data:
        return []
    items = codec.unpack(data)
    if not isinstance(items, list):
        raise WireError(f"expected a list of sequences, got {type(items).__name__}")
    for item in items:
        if not isinstance(item, dict) or not {"id", "prompt_ids", "response_ids"} <= set(item):
            raise WireError("a sequence needs id, prompt_ids and response_ids")
        for name in ("prompt_ids", "response_ids"):
            if getattr(item[name], "ndim", None) != 1 or item[name].dtype.kind != "i":
                raise WireError(f"sequence {item['id']}: {name} is not an array of integers of one dimension")
    return items
