"""OTLP/gRPC receiver: spans of vLLM, scorers and trainer come here, so that no collector is needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from nightshift.wire.errors import BadInputError
from nightshift.wire.listen import LOOPBACK
from nightshift.wire.telemetry import EXPORT_DELAY_S

#: Called with each received span as a map, in the form of the ``span`` event.
SpanSink = Callable[[dict[str, Any]], None]

_STATUS = {0: "unset", 1: "ok", 2: "error"}


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Decodes what exporters send and hands each span to a sink.

    Args:
        sink: gets each span.
        forward: ``http://host:port`` of a further OTLP/gRPC receiver that gets everything as well; None: none.
    """

    def __init__(self, sink: SpanSink, forward: str | None = None) -> None:
        self._sink = sink
        self._server: grpc.aio.Server | None = None
        self._forward_url = forward
        self._channel: grpc.aio.Channel | None = None
        self._forwarding: set[asyncio.Task[None]] = set()
        self._received = False

    async def start(self, port: int, host: str = "127.0.0.1") -> int:
        """Listens; 0 takes any free port. Returns the port.

        Args:
            host: name or address under which senders reach it; on loopback alone where it is one of that.

        Raises:
            BadInputError: the port is taken.
        """
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        try:
            bound = self._server.add_insecure_port(f"{'127.0.0.1' if host in LOOPBACK else '0.0.0.0'}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise BadInputError(
                f"port {port} for spans is taken",
                role="orchestrator",
                fix="Set resources.ports.otlp to a free port or 0",
            )
        await self._server.start()
        if self._forward_url:
            target = self._forward_url.split("://", 1)[-1]
            secure = self._forward_url.startswith("https://")
            credentials = grpc.ssl_channel_credentials() if secure else None
            self._channel = (
                grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
            )
        return int(bound)

    async def stop(self) -> None:
        """Stops listening after the calls in progress, for two seconds at most.

        Services send their spans in batches: where any have come, the last ones are waited for.
        """
        if self._received:
            await asyncio.sleep(EXPORT_DELAY_S + 0.2)
        if self._server is not None:
            await self._server.stop(2.0)
        if self._forwarding:
            await asyncio.wait(self._forwarding, timeout=2.0)
        if self._channel is not None:
            await self._channel.close()

    async def Export(self, request: Any, context: Any) -> Any:
        """Receives one batch of spans."""
        self._received = True
        for span in decode(request):
            self._sink(span)
        if self._channel is not None:
            task = asyncio.create_task(self._forward(self._channel, request))
            self._forwarding.add(task)
            task.add_done_callback(self._forwarding.discard)
        return trace_service_pb2.ExportTraceServiceResponse()

    async def _forward(self, channel: grpc.aio.Channel, request: Any) -> None:
        # A tracing backend that is away must never hold up or fail a run: what it misses still is in events.jsonl.
        with contextlib.suppress(grpc.aio.AioRpcError):
            await trace_service_pb2_grpc.TraceServiceStub(channel).Export(request, timeout=5.0)


def decode(request: Any) -> list[dict[str, Any]]:
    """The spans of an ExportTraceServiceRequest as maps; times in unix seconds, ids in hex."""
    spans = []
    for resource_spans in request.resource_spans:
        service = _attributes(resource_spans.resource.attributes).get("service.name", "")
        role = str(service).removeprefix("nightshift.")
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                spans.append(
                    {
                        "name": span.name,
                        "role": role,
                        "trace_id": span.trace_id.hex(),
                        "span_id": span.span_id.hex(),
                        "parent_id": span.parent_span_id.hex() or None,
                        "links": [{"trace_id": k.trace_id.hex(), "span_id": k.span_id.hex()} for k in span.links],
                        "start": span.start_time_unix_nano / 1e9,
                        "end": span.end_time_unix_nano / 1e9,
                        "attributes": _attributes(span.attributes),
                        "status": _STATUS.get(span.status.code, "unset"),
                    }
                )
    return spans


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)
