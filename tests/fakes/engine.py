"""The fake engine: a server on loopback that speaks vLLM's generate and weight routes (fixture E), and our own route.

It samples from the toy policy, keeps a weight version, a prefix cache and its queue, and writes down every request: in
memory for the tests, and what it served in the request log of the real server.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from nightshift.wire.lease_fence import HEADER, LEASE_OVER, Fence, LeaseFence
from nightshift.wire.request_log import log_path
from services.rollout.request_log import RequestLogger
from tests.fakes import choices, frames, policy, telling, transfers
from tests.fakes.faults import Fault, Faults
from tests.fakes.requests import BASE_VERSION, GENERATE, INFO, PREFETCH, ROUTE, VLLM, Refused, Request, body_of
from tests.fakes.serving import serve
from tests.fakes.sleeper import Sleeper
from tests.fakes.telling import disconnected, seed_of, step_of, tokens_before
from tests.fixtures.tokenizer_k import EOS


class FakeEngine(Sleeper):
    """One server.

    What ``faults`` and ``route_faults`` can be is listed in :mod:`tests.fakes.faults`.

    Args:
        store: folder of published weights.
        token_s: seconds per token.
        script: ids of the answer to a request, or None to sample them.
        vllm: version that it is; says which routes it has.
        route: whether our middleware is in it.
        missing: routes that it lacks all the same, for want of a flag.
        logs: folder of its request log; None: it has none.
        slots: samples that it draws at once; the others wait in its queue.

    Attributes:
        frozen: its engine draws nothing and takes no calls, while the API server goes on answering what it can.
        silent: it takes connections and answers nothing, as a process that was stopped.
        managed: whether its entry in services.json says that the agent started it.
        source: weight server that its entry names; {}: it reads the folder.
    """

    def __init__(
        self,
        store: Path,
        name: str = "rollout-0",
        *,
        token_s: float = 0.0,
        script: Callable[[Request], list[int] | None] | None = None,
        vllm: str = "0.32.0",
        route: bool = True,
        missing: frozenset[str] = frozenset(),
        logs: Path | None = None,
        slots: int = 1 << 20,
    ) -> None:
        self.name = name
        self.store = store
        self.token_s = token_s
        self.script = script
        self.vllm = vllm
        self.route = route
        self.missing = missing
        self.logs = logs
        self.slots = slots
        self.managed = False
        self.source: dict[str, str] = {}
        self.faults = Faults()
        self.route_faults = Faults()
        self.requests: list[Request] = []
        self.keep = True  # whether requests are written down
        self.received = 0
        self.stale_cache_hits = 0
        self.starts = 0
        self.port = 0
        self.alive = False
        self._server: uvicorn.Server | None = None
        self._log = RequestLogger(None)
        self._reset()

    # Life of the process ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts a process: a new incarnation with the base weights, on the port of the one before."""
        self._reset()
        self._log = RequestLogger(self.logs and log_path(self.logs, self.name), self.name, self.incarnation)
        self._server, self.port = await serve(self._app, self.port)
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
        self._log.close()

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
            "init_info": self.source or {"root": str(self.store)},
            "pid": int(self.managed),
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
        self._fence = Fence()
        self._source: transfers.Source | None = None
        self._session: np.ndarray | bool | None = None
        self._go = asyncio.Event()  # decoding goes on
        self._go.set()
        self._open = asyncio.Event()  # new requests begin
        self._open.set()
        self._running: set[int] = set()
        self._aborting: set[int] = set()
        self._idle = asyncio.Condition()
        self._pushed = asyncio.Condition()
        self._prefixes: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        self.updates = 0
        self.asleep = set()
        self.frozen = self.silent = False
        self.drawn = 0
        self.waiting = 0
        self._free = asyncio.Semaphore(self.slots)

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
            order=self.received,
            time=time.time(),
            method=scope["method"],
            path=scope["path"] + (f"?{query}" if query else ""),
            headers={key.decode().lower(): value.decode() for key, value in scope["headers"]},
            body=body_of(scope["path"], data),
            version=self.version,
            paused=not self._go.is_set(),
            updates=self.updates,
        )
        self.received += 1
        if self.keep:
            self.requests.append(request)
        if request.is_sample:
            request.log = self._log.response(request.request_id, request.prompt_ids)
            fault = self.faults.take(request.request_id, request)
        else:
            fault = self.route_faults.take(request.path, request)
        request.fault = fault.kind if fault else ""
        work = asyncio.create_task(self._answer(request, fault))
        work.add_done_callback(lambda _: request.outbox.put_nowait(None))
        streaming = asyncio.create_task(self._send_frames(request, send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            request.disconnected = not work.done()
            if request.disconnected and not (fault and fault.kind == "late"):
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                if request.is_sample and self.alive:
                    request.log.close()
                return
            status, answer = await work
            started = await streaming
        except asyncio.CancelledError:
            return  # the process was killed
        finally:
            work.cancel()
            gone.cancel()
            streaming.cancel()
            await asyncio.gather(work, gone, streaming, return_exceptions=True)
        request.status = status
        if fault and (fault.kind == "drop" or fault.kind.startswith("cut@")):
            await asyncio.sleep(0.01)  # what has been sent is read before the reset
            self._close(scope["client"], abort=True)
            return
        if started:
            await send({"type": "http.response.body", "body": answer})
            request.answered = not request.disconnected
            return
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        request.answered = not request.disconnected
        if status == 500:  # uvicorn closes the connection after a handler that raised
            self._close(scope["client"])

    async def _send_frames(self, request: Request, send: Any) -> bool:
        """Sends the frames that leave before the end; whether there were any."""
        started = False
        while (frame := await request.outbox.get()) is not None:
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                started = True
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        return started

    def _flush(self) -> None:
        """Lets everything leave that has been drawn."""
        for request in self.requests:
            waiting = len(request.tokens) - request.sent
            if request.order in self._running and request.flush_tokens and waiting:
                request.outbox.put_nowait(frames.part(request))

    def _offers(self, path: str) -> bool:
        if path in (ROUTE, INFO, PREFETCH):
            return self.route
        return path in VLLM[self.vllm]["routes"] and path not in self.missing

    def _close(self, client: Any, *, abort: bool = False) -> None:
        for connection in self._server.server_state.connections if self._server else ():
            if connection.client == tuple(client) and connection.transport is not None:
                connection.transport.abort() if abort else connection.transport.close()

    async def _answer(self, request: Request, fault: Fault | None) -> tuple[int, Any]:
        path = request.path.split("?")[0]
        if self.silent or (self.frozen and path not in ("/health", "/version", "/metrics")):
            await asyncio.sleep(3600)
        if (
            path not in ("/health", "/version", "/metrics")
            and request.headers.get("authorization") != f"Bearer {self.token}"
        ):
            return 401, {"error": "unauthorized"}
        if (held := request.headers.get(HEADER)) and request.method == "POST":  # as the guard does
            lease = LeaseFence.parse(held)
            if not self._fence.admits(lease):
                refusal = {"code": 409, "type": LEASE_OVER, "message": self._fence.refusal(lease)}
                return 409, {"error": refusal}
        try:
            if fault and fault.kind == "hang":
                await asyncio.sleep(3600)
            if fault and fault.kind.isdigit():
                if path == "/update_weights":
                    self._session = None
                raise Refused(int(fault.kind), f"planned {fault.kind}")
            if path == "/metrics":
                load = {"running": len(self._running), "waiting": self.waiting, "slots": self.slots}
                return 200, telling.metrics(**load, drawn=self.drawn).encode()
            if not self._offers(path):
                raise Refused(404, f"no route {path}")
            if path == GENERATE and not request.body:
                raise Refused(400, "token_ids is missing")
            if path == "/v1/completions":
                return 200, await self._complete(request)
            if path in (GENERATE, ROUTE):
                return 200, await (self._generate(request, fault) if request.is_sample else self._score(request))
            if fault and fault.kind == "slow":
                await asyncio.sleep(fault.delay)
            return 200, await self._route(path, request, fault)
        except Refused as refused:
            return refused.status, {"error": {"message": str(refused), "code": refused.status}}

    async def _route(self, path: str, request: Request, fault: Fault | None) -> dict[str, Any]:
        if (answer := self._turn(path, request, fault)) is not None:
            return answer
        match path:
            case "/health":
                return {}
            case "/version":
                return {"version": self.vllm}
            case "/v1/models":
                return {"object": "list", "data": [{"id": "base"}]}
            case "/nightshift/v1/info":
                offered = [path for path in VLLM[self.vllm]["routes"] if self._offers(path)]
                return telling.info(self.vllm, self.version, offered, self.missing, bool(self.source))
            case "/nightshift/v1/prefetch":
                if request.body["init_info"] != self.source:
                    raise Refused(400, "another weight server")
            case "/is_paused":
                return {"is_paused": not self._go.is_set()}
            case "/get_world_size":
                return {"world_size": 1}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/pause":
                await self._pause(request)
            case "/resume":
                self._go.set()
                self._open.set()
            case "/init_weight_transfer_engine":
                self._source = await transfers.source(request.body["init_info"], self.store)
            case "/start_weight_update":
                if self._source is None:
                    raise Refused(500, "the weight transfer engine was not initialised")
                if self._session is not None:
                    raise Refused(500, "called while a weight update is active")
                self._session = True
            case "/update_weights":
                if self._session is None:
                    raise Refused(500, "called without a matching start")
                self.updates += 1
                if not (fault and fault.kind == "noop"):
                    self._session = await self._source.take(request.body["update_info"])  # type: ignore[union-attr]
            case "/finish_weight_update":
                if self._session is None:
                    raise Refused(500, "called without a matching start")
                if isinstance(self._session, np.ndarray):
                    self.weights = self._session
                self._session = None
                if not (fault and fault.kind == "ignore_version"):
                    self.version = str(request.body["weight_version"])
                self._log.taken(self.version)
                async with self._pushed:
                    self._pushed.notify_all()
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
                self._abort()
            async with self._idle:
                await self._idle.wait_for(lambda: not self._running)
            self._go.clear()
        self._stopped(options.get("clear_cache", "true") == "true")

    def _abort(self) -> None:
        """Gives up what runs."""
        self._aborting |= self._running

    def _stopped(self, clear_cache: bool) -> None:
        """Decoding stands still."""
        if clear_cache:
            self._prefixes.clear()
        self._flush()

    # Sampling ---------------------------------------------------------------------------------------------------------

    async def _complete(self, request: Request) -> dict[str, Any]:
        """Scores a prompt on the route that every vLLM server has."""
        if not request.body:
            raise Refused(400, "prompt is missing")
        scored = await self._score(replace(request, body={"token_ids": request.body["prompt"]}))
        choice = {"index": 0, "prompt_logprobs": scored["prompt_logprobs"]}
        return {"id": "cmpl-1", "model": "base", "choices": [choice]}

    async def _score(self, request: Request) -> dict[str, Any]:
        await self._go.wait()
        ids = request.prompt_ids
        scores = policy.score(self.weights, ids[:1], ids[1:])
        rows = telling.prompt_logprobs(ids, list(scores))
        return {"request_id": f"generate-tokens-{request.request_id}", "choices": [], "prompt_logprobs": rows}

    async def _generate(self, request: Request, fault: Fault | None) -> dict[str, Any]:
        if fault and fault.kind == "late":
            await asyncio.sleep(fault.delay)
        await self._open.wait()
        await self._go.wait()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self._running.add(request.order)
        try:
            if fault and fault.kind == "slow":
                await asyncio.sleep(fault.delay)
            finish = await self._sample(request, fault)
        finally:
            self._free.release()
            self._running.discard(request.order)
            async with self._idle:
                self._idle.notify_all()
        if fault and fault.kind == "not_json":
            return b"<html>"  # type: ignore[return-value]
        answered = "somebody.else" if fault and fault.kind == "wrong_id" else request.request_id
        if request.framed:
            spans = VLLM[self.vllm]["spans"]
            return frames.last(request, answered, finish, spans, fault)  # type: ignore[return-value]
        choice = choices.choice(request.tokens, request.logprobs, request.labels, finish)
        request.log.choice(choice)
        choice = choices.spoil(choice, fault)
        usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(choice["token_ids"])}
        return {
            "request_id": f"generate-tokens-{answered}",
            "model": "base",
            "usage": usage,
            "choices": [choice],
            "prompt_logprobs": None,
        }

    async def _sample(self, request: Request, fault: Fault | None) -> str:
        """Draws the tokens of a request; its finish reason."""
        sampling = request.sampling
        temperature = float(sampling.get("temperature", 1.0))
        stops = {int(token) for token in sampling.get("stop_token_ids", [])} | {EOS}
        scripted = self.script(request) if self.script else None
        limit = int(sampling["max_tokens"]) if scripted is None else len(scripted)
        rng = np.random.default_rng(seed_of(sampling.get("seed"), request.request_id))
        key = tuple(request.prompt_ids)
        ids = request.tokens
        previous = key[-1]
        if fault and fault.kind == "empty":
            return "stop"
        if (long := tokens_before(fault, "long")) >= 0:
            limit, stops, scripted = long, set(), None
        while len(ids) < limit:
            await self._go.wait()
            if self.frozen or self.silent:
                await asyncio.sleep(3600)
            if request.order in self._aborting or len(ids) == tokens_before(fault, "abort"):
                request.aborted = True
                return "abort"
            if len(ids) == tokens_before(fault, "cut"):
                return "length"
            if len(ids) in (tokens_before(fault, "stall"), tokens_before(fault, "behind")):
                async with self._pushed:
                    await self._pushed.wait_for(lambda: step_of(self.version) >= step_of(request.labels[0]) + 2)
            if len(ids) == tokens_before(fault, "stall"):
                return "abort"
            values = policy.log_probs(
                self._prefix(request, key) if not ids else self.weights, previous, temperature or 1.0
            )
            if scripted is not None:
                token = scripted[len(ids)]
            elif temperature == 0:
                token = int(np.argmax(values))
            else:
                token = int(np.searchsorted(np.cumsum(np.exp(values)), rng.random()))
            ids.append(token)
            self.drawn += 1
            request.logprobs.append(float(values[token]))
            request.labels.append(self.version)
            previous = token
            if request.flush_tokens and len(ids) - request.sent >= request.flush_tokens:
                request.outbox.put_nowait(frames.part(request))
            if token in stops:
                return "stop"
            await asyncio.sleep(self.token_s)
        return "length"

    def _prefix(self, request: Request, key: tuple[int, ...]) -> np.ndarray:
        """Weights that the cached prefix was computed with; it is stale where the request came after newer ones."""
        cached = self._prefixes.setdefault((request.updates, key), self.weights)
        if cached is not self.weights and request.updates == self.updates:
            self.stale_cache_hits += 1
        return cached
