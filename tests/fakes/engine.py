"""The fake engine: a server on loopback that speaks vLLM's generate and weight routes (fixture E).

It samples from the toy policy, keeps a weight version, a prefix cache and its queue, and writes down every request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from tests.fakes import policy
from tests.fakes.faults import Fault, Faults
from tests.fixtures.tokenizer_k import EOS

GENERATE = "/inference/v1/generate"
BASE_VERSION = "default"


@dataclass
class Request:
    """One request that was received."""

    order: int
    time: float
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    version: str  # weights on the server when it came
    paused: bool  # whether the server was paused when it came
    status: int = 0
    answered: bool = False
    disconnected: bool = False
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    fault: str = ""

    @property
    def request_id(self) -> str:
        """The client's own id."""
        return self.headers.get("x-request-id", "")

    @property
    def is_sample(self) -> bool:
        """Whether a sample is drawn, and not a sequence scored."""
        return self.path == GENERATE and "prompt_logprobs" not in self.body.get("sampling_params", {})

    @property
    def prompt_ids(self) -> list[int]:
        """Prompt token ids."""
        return list(self.body.get("token_ids", []))

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters."""
        return dict(self.body.get("sampling_params", {}))


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeEngine:
    """One server.

    ``faults`` of samples, by request id: ``503``, ``400``, ``drop`` (connection reset), ``hang``, ``late`` (answers
    after ``delay`` even where nobody listens), ``slow``, ``abort``, ``wrong_id``, ``short_logprobs``, ``null_logprob``,
    ``positive_logprob``, ``zero_logprobs``, ``no_versions``, ``gap``, ``unknown_version``, ``null_version``,
    ``bad_finish``, ``empty``, ``not_json``.
    ``route_faults`` of all other calls, by path: ``500``, ``hang``, ``slow``, ``noop`` (of /update_weights: success
    without an effect), ``ignore_version`` (of /finish_weight_update).

    Args:
        store: folder of published weights.
        token_s: seconds per token.
        script: ids of the answer to a request, or None to sample them.
    """

    def __init__(
        self,
        store: Path,
        name: str = "rollout-0",
        *,
        token_s: float = 0.0,
        script: Callable[[Request], list[int] | None] | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self.token_s = token_s
        self.script = script
        self.faults = Faults()
        self.route_faults = Faults()
        self.requests: list[Request] = []
        self.stale_cache_hits = 0
        self.starts = 0
        self.port = 0
        self.alive = False
        self._server: uvicorn.Server | None = None
        self._reset()

    # Life of the process ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts a process: a new incarnation with the base weights, on the port of the one before."""
        self._reset()
        # The protocol is named so that asyncio turns Nagle's algorithm off, which would delay each answer by 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app, interface="asgi3", lifespan="off", log_level="error", access_log=False, ws="none"
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        self._server = server
        self.alive = True

    async def kill(self) -> None:
        """Ends the process as kill -9 does: connections are reset, requests lost."""
        server, self._server, self.alive = self._server, None, False
        if server is None:
            return
        for listener in server.servers:
            listener.close()
        tasks = list(server.server_state.tasks)
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stop = kill

    @property
    def address(self) -> dict[str, Any]:
        """Its entry in services.json."""
        return {
            "name": self.name,
            "url": f"http://127.0.0.1:{self.port}",
            "token": self.token,
            "incarnation": self.incarnation,
            "weight_backend": "safetensors",
            "init_info": {"root": str(self.store)},
            "pid": 0,
        }

    @property
    def samples(self) -> list[Request]:
        """Requests for samples, in order of arrival."""
        return [request for request in self.requests if request.is_sample]

    @property
    def running(self) -> int:
        """Samples being drawn now."""
        return len(self._running)

    def calls(self, path: str) -> list[Request]:
        """Requests to one path."""
        return [request for request in self.requests if request.path.split("?")[0] == path]

    def _reset(self) -> None:
        self.starts += 1
        self.incarnation = secrets.token_hex(4)
        self.token = secrets.token_hex(8)
        self.weights = policy.base_bias()
        self.version = BASE_VERSION
        self._initialised = False
        self._session: np.ndarray | bool | None = None
        self._go = asyncio.Event()  # decoding goes on
        self._go.set()
        self._open = asyncio.Event()  # new requests begin
        self._open.set()
        self._running: set[int] = set()
        self._aborting: set[int] = set()
        self._idle = asyncio.Condition()
        self._prefixes: dict[tuple[int, ...], np.ndarray] = {}

    # HTTP -------------------------------------------------------------------------------------------------------------

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        data = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        query = scope["query_string"].decode()
        request = Request(
            order=len(self.requests),
            time=time.time(),
            method=scope["method"],
            path=scope["path"] + (f"?{query}" if query else ""),
            headers={key.decode().lower(): value.decode() for key, value in scope["headers"]},
            body=json.loads(data) if data else {},
            version=self.version,
            paused=not self._go.is_set(),
        )
        self.requests.append(request)
        if request.is_sample:
            fault = self.faults.take(request.request_id, request)
        else:
            fault = self.route_faults.take(request.path, request)
        request.fault = fault.kind if fault else ""
        work = asyncio.create_task(self._answer(request, fault))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            request.disconnected = not work.done()
            if request.disconnected and not (fault and fault.kind == "late"):
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                return
            status, answer = await work
        except asyncio.CancelledError:
            return  # the process was killed
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        request.status = status
        if fault and fault.kind == "drop":
            self._close(scope["client"], abort=True)
            return
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        request.answered = not request.disconnected
        if status == 500:  # uvicorn closes the connection after a handler that raised
            self._close(scope["client"])

    def _close(self, client: Any, *, abort: bool = False) -> None:
        for connection in self._server.server_state.connections if self._server else ():
            if connection.client == tuple(client) and connection.transport is not None:
                connection.transport.abort() if abort else connection.transport.close()

    async def _answer(self, request: Request, fault: Fault | None) -> tuple[int, Any]:
        path = request.path.split("?")[0]
        if path != "/health" and request.headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"error": "unauthorized"}
        try:
            if fault and fault.kind == "hang":
                await asyncio.sleep(3600)
            if fault and fault.kind.isdigit():
                if path == "/update_weights":
                    self._session = None
                raise Refused(int(fault.kind), f"planned {fault.kind}")
            if path == GENERATE:
                return 200, await (self._generate(request, fault) if request.is_sample else self._score(request))
            if fault and fault.kind == "slow":
                await asyncio.sleep(fault.delay)
            return 200, await self._route(path, request, fault)
        except Refused as refused:
            return refused.status, {"error": {"message": str(refused), "code": refused.status}}

    async def _route(self, path: str, request: Request, fault: Fault | None) -> dict[str, Any]:
        match path:
            case "/health":
                return {}
            case "/is_paused":
                return {"is_paused": not self._go.is_set()}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/pause":
                await self._pause(request)
            case "/resume":
                self._go.set()
                self._open.set()
            case "/init_weight_transfer_engine":
                self._initialised = True
            case "/start_weight_update":
                if not self._initialised:
                    raise Refused(500, "the weight transfer engine was not initialised")
                self._session = True
            case "/update_weights":
                if self._session is None:
                    raise Refused(500, "called without a matching start")
                if not (fault and fault.kind == "noop"):
                    file = self.store / str(request.body["update_info"]["path"])
                    self._session = np.load(file, allow_pickle=False)
            case "/finish_weight_update":
                if self._session is None:
                    raise Refused(500, "called without a matching start")
                if isinstance(self._session, np.ndarray):
                    self.weights = self._session
                self._session = None
                if not (fault and fault.kind == "ignore_version"):
                    self.version = str(request.body["weight_version"])
            case _:
                raise Refused(404, f"no route {path}")
        return {}

    async def _pause(self, request: Request) -> None:
        options = dict(part.split("=") for part in request.path.partition("?")[2].split("&") if part)
        mode = options.get("mode", "abort")
        if mode == "keep":
            self._go.clear()
        else:
            self._open.clear()
            if mode == "abort":
                self._aborting |= self._running
            async with self._idle:
                await self._idle.wait_for(lambda: not self._running)
            self._go.clear()
        if options.get("clear_cache", "true") == "true":
            self._prefixes.clear()

    # Sampling ---------------------------------------------------------------------------------------------------------

    async def _score(self, request: Request) -> dict[str, Any]:
        await self._go.wait()
        ids = request.prompt_ids
        scores = policy.score(self.weights, ids[:1], ids[1:])
        rows = [
            None,
            *({str(token): {"logprob": float(s), "rank": 1}} for token, s in zip(ids[1:], scores, strict=True)),
        ]
        return {"request_id": f"generate-tokens-{request.request_id}", "choices": [], "prompt_logprobs": rows}

    async def _generate(self, request: Request, fault: Fault | None) -> dict[str, Any]:
        if fault and fault.kind == "late":
            await asyncio.sleep(fault.delay)
        await self._open.wait()
        await self._go.wait()
        self._running.add(request.order)
        try:
            if fault and fault.kind == "slow":
                await asyncio.sleep(fault.delay)
            choice = await self._sample(request, fault)
        finally:
            self._running.discard(request.order)
            async with self._idle:
                self._idle.notify_all()
        answered = "somebody.else" if fault and fault.kind == "wrong_id" else request.request_id
        usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(choice["token_ids"])}
        answer = {
            "request_id": f"generate-tokens-{answered}",
            "model": "base",
            "usage": usage,
            "choices": [choice],
            "prompt_logprobs": None,
        }
        return b"<html>" if fault and fault.kind == "not_json" else answer  # type: ignore[return-value]

    async def _sample(self, request: Request, fault: Fault | None) -> dict[str, Any]:
        sampling = request.sampling
        temperature = float(sampling.get("temperature", 1.0))
        stops = {int(token) for token in sampling.get("stop_token_ids") or []} | {EOS}
        scripted = self.script(request) if self.script else None
        limit = int(sampling["max_tokens"]) if scripted is None else len(scripted)
        rng = np.random.default_rng(_seed(sampling.get("seed"), request.request_id))
        key = tuple(request.prompt_ids)
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[str] = []
        finish = "length"
        previous = key[-1]
        while len(ids) < limit and not (fault and fault.kind == "empty"):
            await self._go.wait()
            if request.order in self._aborting or (fault and fault.kind == "abort"):
                finish = "abort"
                break
            values = policy.log_probs(self._prefix(key) if not ids else self.weights, previous, temperature or 1.0)
            if scripted is not None:
                token = scripted[len(ids)]
            elif temperature == 0:
                token = int(np.argmax(values))
            else:
                token = int(np.searchsorted(np.cumsum(np.exp(values)), rng.random()))
            ids.append(token)
            logprobs.append(float(values[token]))
            versions.append(self.version)
            previous = token
            if token in stops:
                finish = "stop"
                break
            await asyncio.sleep(self.token_s)
        if fault and fault.kind == "empty":
            finish = "stop"
        request.tokens, request.aborted = ids, finish == "abort"
        return _spoil(_choice(ids, logprobs, versions, finish), fault)

    def _prefix(self, key: tuple[int, ...]) -> np.ndarray:
        """Weights that the cached prefix was computed with."""
        cached = self._prefixes.setdefault(key, self.weights)
        if cached is not self.weights:
            self.stale_cache_hits += 1
        return cached


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _seed(seed: Any, request_id: str) -> int:
    if seed is not None:
        return int(seed)
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")


def _choice(ids: list[int], logprobs: list[float], versions: list[str], finish: str) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    content = [{"token_id": token, "logprob": value, "rank": 1} for token, value in zip(ids, logprobs, strict=True)]
    return {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }


def _spoil(choice: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
    content, spans = choice["logprobs"]["content"], choice["weight_versions"]
    match fault.kind if fault else "":
        case "short_logprobs":
            content.pop()
        case "null_logprob":
            content[0]["logprob"] = None
        case "positive_logprob":
            content[0]["logprob"] = 0.3
        case "zero_logprobs":
            for entry in content:
                entry["logprob"] = 0.0
        case "no_versions":
            choice["weight_versions"] = []
        case "gap":
            spans[-1]["end"] += 1
        case "unknown_version":
            for span in spans:
                span["version"] = BASE_VERSION
        case "null_version":
            for span in spans:
                span["version"] = None
        case "bad_finish":
            choice["finish_reason"] = "error"
    return choice
