"""ASGI middleware inside vLLM's server: token ids in; ids, log-probs and weight versions out, as arrays.

    POST /nightshift/v1/generate    a msgpack map in, frames of :mod:`nightshift.wire.frames` out
    GET  /nightshift/v1/info        what this server is and can do, JSON
    POST /nightshift/v1/prefetch    fetches a weight file while decoding goes on, JSON
    GET  /nightshift/v1/requests    the request log from byte ``from`` on; from its end without one

vLLM's own ``/inference/v1/generate`` makes two Python objects and 140 bytes of JSON of each token; this route reads the
same numbers from the engine client as lists and sends them as arrays. ``flush_tokens`` of a request says after how many
tokens a frame leaves, so that what was drawn outlives the server; with 0 there is one frame, at the end.

It also watches vLLM's pause and weight routes pass, since it has to know at which token the weights changed. From the
first update on, requests carry its number as their salt, also those to vLLM's own routes: where running responses keep
their cache at an update (``/pause?clear_cache=false``), a new request still finds no block of earlier weights.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

from nightshift.wire.errors import WireError
from nightshift.wire.frames import CONTENT_TYPE
from nightshift.wire.rollout import INFO, LOG_ID, LOG_SIZE, PREFETCH, REQUESTS, ROUTE
from services.rollout import pull
from services.rollout.asgi import ClientGoneError, StatusWatch, answer_json, headers_of, read_body, replay
from services.rollout.compat import EngineClient
from services.rollout.guard import AUTHENTICATED, App, Receive, Scope, Send
from services.rollout.request import parse_request, salted
from services.rollout.request_log import LOG_VARIABLE, AnswerWatch, RequestLogger
from services.rollout.streams import Stream, Streams
from services.rollout.weights import WeightFileError

#: vLLM's own routes: for token ids, and for text.
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
#: Names this start of the server, where its launcher sets it.
INCARNATION_VARIABLE = "NIGHTSHIFT_INCARNATION"

Handler = Callable[[EngineClient, Scope, Receive, Send], Awaitable[None]]


class Route:
    """The middleware. It is named before the guard on vLLM's command line, since the last one named stands outside."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._engine: EngineClient | None = None
        self._streams = Streams()
        self._log = RequestLogger.of_environment(INCARNATION_VARIABLE)
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", ROUTE): self._generate,
            ("GET", INFO): self._info,
            ("POST", PREFETCH): self._prefetch,
            ("GET", REQUESTS): self._requests,
            ("POST", GENERATE): self._watch,
            ("POST", COMPLETIONS): self._salted,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the own routes, watches some of vLLM's, and passes the others on."""
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
        elif not scope.get(AUTHENTICATED):
            await answer_json(
                send, 401, {"error": {"code": 401, "message": "the guard does not stand before the route"}}
            )
        else:
            if self._engine is None:
                self._engine = EngineClient(scope["app"])
            await handler(self._engine, scope, receive, send)

    # The own routes ---------------------------------------------------------------------------------------------------

    async def _info(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_json(
            send,
            200,
            {
                "vllm_version": engine.vllm_version,
                "weight_version": self._streams.tracker.version,
                "incarnation": os.environ.get(INCARNATION_VARIABLE, ""),
                "routes": engine.routes(),
                "weight_backend": engine.weight_backend,
                "capabilities": {**engine.capabilities(), "prefetch": True},
            },
        )

    async def _prefetch(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        """Fetches the weights of the next update: the pause of the update itself holds no transfer then."""
        try:
            body = json.loads(await read_body(receive))
            source = pull.source(str(body["init_info"]["url"]), str(body["init_info"].get("token", "")))
            file = pull.remote_file(dict(body["update_info"]))
        except ClientGoneError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            await answer_json(send, 400, {"error": {"code": 400, "message": f"prefetch: {error}"}})
            return
        try:
            await asyncio.to_thread(pull.fetch, source, file, pull.cache_folder())
        except (WeightFileError, OSError) as error:
            await answer_json(send, 422, {"error": {"code": 422, "message": str(error)}})
            return
        await answer_json(send, 200, {"path": file.name})

    async def _requests(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        """A piece of the request log, for a run whose folder this server does not share."""
        if not self._log.active:
            await answer_json(send, 404, {"error": {"code": 404, "message": f"{LOG_VARIABLE} names no request log"}})
            return
        wanted = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("from", [""])[0]
        piece = self._log.read(int(wanted) if wanted.isdigit() else None)
        headers = [
            (b"content-type", b"application/x-ndjson"),
            (b"content-length", str(len(piece.data)).encode()),
            (LOG_ID.encode(), piece.file.encode()),
            (LOG_SIZE.encode(), str(piece.size).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": piece.data})

    async def _generate(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        try:
            wanted = parse_request(await read_body(receive))
            request = engine.request(
                wanted.token_ids,
                wanted.sampling,
                self._streams.free_key(wanted.request_id),
                await engine.trace_headers(headers),
                # After the wait: from here until the request is known to the streams nothing comes between.
                self._streams.salt,
            )
        except ClientGoneError:
            return
        except (WireError, ValueError) as error:
            await answer_json(send, 400, {"error": {"code": 400, "message": str(error)}})
            return
        log = self._log.response(wanted.request_id, wanted.token_ids)
        stream = self._streams.add(wanted.request_id, request, wanted.flush_tokens, log)
        gone = asyncio.create_task(_disconnected(receive))
        sending = asyncio.create_task(_send_frames(stream, send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)
            await self._streams.remove(stream)

    # vLLM's routes on their way ---------------------------------------------------------------------------------------

    async def _watch(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's own generate route: what it answers is written down as well."""
        if not self._log.active:
            await self._salted(engine, scope, receive, send)
            return
        try:
            body = await read_body(receive)
        except ClientGoneError:
            return
        body = salted(body, self._streams.salt)
        watch = AnswerWatch(send, self._log, headers_of(scope), body)
        try:
            await self._app(scope, replay(body, receive), watch)
        finally:
            watch.close()

    async def _salted(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        """A request to a route of vLLM's own, kept from cached prefixes of earlier weights."""
        if not self._streams.salt:
            await self._app(scope, receive, send)
            return
        try:
            body = salted(await read_body(receive), self._streams.salt)
        except ClientGoneError:
            return
        await self._app(scope, replay(body, receive), send)

    async def _pause(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
        await engine.settle(self._streams.requests)
        self._streams.flush()

    async def _resume(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.resuming()
        await self._app(scope, receive, send)

    async def _update(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        await engine.settle(self._streams.requests)
        self._streams.updating()
        await self._app(scope, receive, send)

    async def _sleep(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        """At level 2 the weights are gone, as if an update had begun: what is drawn before one is finished has none."""
        if parse_qs(scope.get("query_string", b"").decode("latin-1")).get("level") == ["2"]:
            await self._update(engine, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _finish(self, engine: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
        except ClientGoneError:
            return
        version = _version(body)
        # A vLLM that keeps no version has no use for the name either.
        passed = body if engine.names_weights else b""
        watch = StatusWatch(send)
        await self._app(scope, replay(passed, receive), watch)
        if watch.status < 300:
            self._log.taken(version)
            self._streams.finished(version)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_frames(stream: Stream, send: Send) -> None:
    """Sends frames as they come; the status is decided by what comes first."""
    started = False
    async for data in stream.frames():
        if not started:
            if stream.refusal is not None:
                status, text = stream.refusal
                await answer_json(send, status, {"error": {"code": status, "message": text}})
                return
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", CONTENT_TYPE.encode())]}
            )
            started = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _version(body: bytes) -> str:
    """The name that the caller gives to the new weights; "" where it gives none: then they are unknown."""
    try:
        value = json.loads(body) if body else {}
    except ValueError:
        return ""
    version = value.get("weight_version") if isinstance(value, dict) else None
    return version if isinstance(version, str) else ""
