"""Client of one vLLM server: token ids in, token ids out, and the weight-transfer phases."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from nightshift.wire import codec
from nightshift.wire.errors import RoleError, RoleTimeoutError, VersionConflictError
from nightshift.wire.experience import Floats, Ids
from nightshift.wire.lease_fence import HEADER, LEASE_OVER
from nightshift.wire.listen import LOOPBACK
from nightshift.wire.rollout import INFO, PREFETCH, ROUTE
from orchestrator.runner.answers import (
    AsleepError,
    EngineAwayError,
    EngineLateError,
    EngineRefusedError,
    Generated,
    GenerateRequest,
    InvalidAnswerError,
    LeaseOverError,
    parse_generated,
    parse_prompt_logprobs,
)
from orchestrator.runner.capabilities import GENERATE, Capabilities, from_info, from_statuses
from orchestrator.runner.collector import Collector
from orchestrator.runner.deadlines import Deadlines
from orchestrator.runner.files import Room
from orchestrator.runner.http1 import ConnectionLostError, Http1Client
from orchestrator.runner.load import Load, parse_load
from orchestrator.runner.reply import Reply, object_of
from orchestrator.runner.weight_link import Sending

#: Idle connections are closed before the server, which does so after 5 s, can close them under a request.
_KEEPALIVE_S = 2.0
_ADMIN_TIMEOUT_S = 60.0
#: A whole model may have to come over a network.
_FETCH_TIMEOUT_S = 900.0
_LOOK_TIMEOUT_S = 5.0
#: Calls other than for samples never wait for a sample to end: the reserve of open files is theirs.
_ADMIN_ROOM = Room(1 << 30)
#: What a server says that it holds after an update that was broken off.
_UNFINISHED = "unfinished"


@dataclass(slots=True)
class EngineAddress:
    """Where a server is, and which start of it."""

    name: str
    url: str
    token: str
    incarnation: str
    weight_backend: str = "safetensors"
    init_info: dict[str, Any] = field(default_factory=dict)
    managed: bool = False  # whether the agent of this run started it, and can start it again
    lease: str = ""  # fencing token of the lease under which the run has it; "": it is the run's own

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request to it."""
        lease = {HEADER: self.lease} if self.lease else {}
        return {"Authorization": f"Bearer {self.token}", **lease}


class Engine:
    """One server. All calls have a deadline; errors say whether sending again can help.

    Args:
        address: where it is.
        request_timeout_s: longest time for one response.
        flush_tokens: tokens after which a part of a response is sent, so that it outlives the server; 0: only whole
            responses are.
    """

    def __init__(self, address: EngineAddress, request_timeout_s: float, flush_tokens: int = 0) -> None:
        self.address = address
        self.capabilities: Capabilities | None = None
        self.woke_s = 0.0  # seconds in which it was woken for the last push
        self._timeout_s = request_timeout_s
        self._flush_tokens = flush_tokens
        self._deadlines = Deadlines(request_timeout_s)
        self._broken = ""
        self._closed = False
        # Responses have connections of their own, without a limit: a pause must never wait for one of them to end.
        self._frames = Http1Client(address.url, address.headers)
        self._samples = self._client()
        self._admin = Http1Client(address.url, address.headers, _ADMIN_ROOM)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.address.url,
            headers=self.address.headers,
            timeout=httpx.Timeout(self._timeout_s, connect=5.0, pool=None),
            # Certificates are read once: for each client of each server that took 20 ms, whether it needs any or not.
            verify=_certificates() if self.address.url.startswith("https") else False,
            # A proxy of the environment is meant for the outside, and cannot reach this machine's loopback.
            trust_env=httpx.URL(self.address.url).host not in LOOPBACK,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S),
        )

    async def close(self) -> None:
        """Closes the connections. Whatever is asked of the server from now on finds it away."""
        self._closed = True
        self._deadlines.close()
        await self._frames.close()
        await self._samples.aclose()
        await self._admin.close()

    def break_off(self, cause: str) -> None:
        """Gives up all requests for samples at once, with this cause; what came in of them is kept by who sent them."""
        self._broken = cause
        self._deadlines.expire()

    async def connect(self) -> Capabilities:
        """Finds out what the server can do, once.

        Raises:
            RoleError: it is away, or lacks something that is needed; the message names the flag.
        """
        if self.capabilities is None:
            name = self.address.name
            info = await self._get(INFO)
            if info.status_code == 200:
                self.capabilities = from_info(name, object_of(info, name, INFO))
            else:
                version = str(object_of(await self._get("/version"), name, "/version").get("version", ""))
                statuses = {path: (await self._get(path)).status_code for path in ("/is_paused", "/weight_info")}
                probe = await self._request("POST", GENERATE, body={}, timeout_s=_ADMIN_TIMEOUT_S)
                self.capabilities = from_statuses(name, version, statuses | {GENERATE: probe.status_code})
        return self.capabilities

    async def generate(self, request: GenerateRequest, on_sent: Callable[[], None] | None = None) -> Generated:
        """Draws one sample. ``on_sent`` is called when the request has left.

        Raises:
            EngineAwayError: connection lost, 5xx or aborted: send again; ``partial`` holds what came in.
            EngineLateError: no end within the time of one request.
            EngineRefusedError: 4xx.
            InvalidAnswerError: the answer is not that of this request, or its log-probs are unusable.
        """
        if (self.capabilities or await self.connect()).route:
            return await self._draw(request, on_sent)
        sampling: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(request.stop_token_ids),
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_eos,
        }
        if request.seed is not None:
            sampling["seed"] = request.seed
        headers = {"X-Request-Id": request.request_id}
        if request.traceparent:
            headers["traceparent"] = request.traceparent
        body = {"token_ids": request.prompt_ids.tolist(), "sampling_params": sampling}
        try:
            async with self._deadlines.block():
                answer = await self._call(
                    "POST",
                    GENERATE,
                    body=body,
                    headers=headers,
                    timeout_s=2 * self._timeout_s,
                    on_sent=on_sent,
                    client=self._samples,
                )
        except TimeoutError as error:
            raise self._late(GENERATE, None) from error
        return parse_generated(answer, request.request_id, request.max_tokens)

    async def _draw(self, request: GenerateRequest, on_sent: Callable[[], None] | None) -> Generated:
        """Draws one sample by our own route."""
        body = {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids.astype(np.int32, copy=False),
            "flush_tokens": self._flush_tokens,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stop_token_ids": request.stop_token_ids,
            "seed": request.seed,
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_eos,
        }
        headers = {"Content-Type": "application/msgpack"}
        if request.traceparent:
            headers["traceparent"] = request.traceparent
        collector = Collector(request.request_id, request.max_tokens)
        try:
            status, text = await self._frames.stream(
                ROUTE, codec.pack_known(body), headers, collector.feed, self._deadlines, on_sent
            )
        except TimeoutError as error:
            raise self._late(ROUTE, collector.partial()) from error
        except ConnectionLostError as error:
            raise self._away(error, collector.partial()) from error
        if status != 200:
            self._check_status(status, text.decode(errors="replace"), ROUTE)
        return collector.finish()

    def _late(self, path: str, partial: Generated | None) -> EngineLateError:
        name = self.address.name
        if self._broken:
            return EngineLateError(f"{name} was given up: {self._broken}", partial=partial)
        return EngineLateError(f"{name} did not answer {path} within {self._timeout_s:g} s", partial=partial)

    async def score(self, prompt_ids: Ids, response_ids: Ids) -> Floats:
        """Log-probs [T] of the response tokens under the server's weights, at temperature 1."""
        ids = [*prompt_ids.tolist(), *response_ids.tolist()]
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}}
        answer = await self._call("POST", GENERATE, body=body, timeout_s=self._timeout_s)
        try:
            return parse_prompt_logprobs(answer.get("prompt_logprobs") or [], ids, len(prompt_ids))
        except InvalidAnswerError as error:
            raise InvalidAnswerError(f"{self.address.name} {error.message}", error.kind) from error

    async def healthy(self) -> bool:
        """Whether the server answers its health check."""
        if self._closed:
            return False
        try:
            return (await self._request("GET", "/health", timeout_s=_LOOK_TIMEOUT_S)).status_code == 200
        except RoleError:
            return False

    async def load(self) -> Load | None:
        """What the server says of its load; None where it answers and has no such metrics.

        Raises:
            RoleError: it does not answer.
        """
        answer = await self._request("GET", "/metrics", timeout_s=_LOOK_TIMEOUT_S)
        return parse_load(answer.text) if answer.status_code == 200 else None

    async def weight_version(self) -> str:
        """The version that the server says it holds."""
        path = INFO if (await self.connect()).route else "/weight_info"
        return str((await self._call("GET", path)).get("weight_version", ""))

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Prepares the weight transfer; once per start of the server."""
        await self._call("POST", "/init_weight_transfer_engine", body={"init_info": info})

    async def workers(self) -> int:
        """Processes that hold its weights."""
        path = "/get_world_size"
        size = (await self._call("GET", path)).get("world_size")
        if not isinstance(size, int) or size < 1:
            raise InvalidAnswerError(f"{self.address.name} answered {path} with {size!r}", "workers")
        return size

    async def pause(self, mode: str = "keep", *, clear_cache: bool = True) -> None:
        """Stops decoding; running requests are kept ("keep") or waited for ("wait").

        Args:
            clear_cache: whether the server forgets what it has computed, running requests included.
        """
        # Only waiting for running requests may take as long as a request.
        timeout_s = self._timeout_s if mode == "wait" else _ADMIN_TIMEOUT_S
        kept = "" if clear_cache else "&clear_cache=false"
        await self._call("POST", f"/pause?mode={mode}{kept}", timeout_s=timeout_s)

    async def resume(self) -> None:
        """Goes on decoding. Asked twice: after a failed phase a server closes the connection that the first may use."""
        try:
            await self._call("POST", "/resume")
        except EngineAwayError:
            await self._call("POST", "/resume")

    async def sleep(self) -> None:
        """Has the server give the memory of its weights and cache back; until :meth:`push` it holds neither.

        Raises:
            AsleepError: it failed to.
            RoleError: it says that it is awake.
        """
        await self._turn("/sleep?level=2&mode=abort")
        if not await self._sleeping():
            raise RoleError(
                f"{self.address.name} answered /sleep with success, and is awake",
                role="rollout",
                fix="Leave rollout.sleep_mode out, or use a version of vLLM from requirements/",
            )

    async def _sleeping(self) -> bool:
        return bool((await self._call("GET", "/is_sleeping")).get("is_sleeping"))

    async def _turn(self, path: str) -> None:
        """Has the server sleep, or wake a part of its memory."""
        try:
            await self._call("POST", path)
        except EngineAwayError as error:
            if error.lost:
                raise
            raise AsleepError(error.message, role="rollout") from error

    async def _wake(self, tag: str) -> None:
        began = time.perf_counter()
        await self._turn(f"/wake_up?tags={tag}")
        self.woke_s += time.perf_counter() - began

    async def push(
        self,
        update_info: dict[str, Any],
        version: str,
        *,
        mode: str = "keep",
        keep_cache: bool = False,
        sleeps: bool = False,
        sending: Sending | None = None,
    ) -> float:
        """Takes new weights under running requests; returns the seconds for which decoding stood still.

        Weights that come by HTTP are fetched before the pause where the server can do that.

        Args:
            keep_cache: whether running requests keep the keys and values of the weights before, where the server can
                keep new requests from them.
            sleeps: whether it may be asleep: its weights wake before the update and its cache after it, so that no
                more than needed is there beside what the trainer still holds.
            sending: what the trainer does while the server takes the weights; None: nothing.

        After any failure the server is resumed with the weights it has, so that nothing waits for ever; whether they
        may be used is for the caller's probe to say. One that hangs in a transfer is left as it is.

        Raises:
            AsleepError: it could not be woken.
            RoleError: a phase failed; the message names it.
        """
        self._broken, self.woke_s, hangs = "", 0.0, False
        able = await self.connect()
        if "url" in self.address.init_info and able.prefetch:
            body = {"init_info": self.address.init_info, "update_info": update_info}
            await self._call("POST", PREFETCH, body=body, timeout_s=_FETCH_TIMEOUT_S)
        began = time.perf_counter()
        # Asked, since who put it to sleep may have been a run of this job before, or one whose trainer was lost. One
        # that is paused answers as if it slept; to wake it then changes nothing.
        asleep = sleeps and await self._sleeping()
        if asleep:
            await self._wake("weights")
        await self.pause(mode, clear_cache=not (keep_cache and able.keep_cache))
        try:
            await self._start_update()
            await self._take(update_info, sending)
            await self._call("POST", "/finish_weight_update", body={"weight_version": version})
        except RoleTimeoutError:
            hangs = sending is not None  # it waits for its peer, and would in any other call: it must be started again
            raise
        finally:
            if asleep and not hangs:  # never resumed without it: requests would be drawn into memory that is not there
                await self._wake("kv_cache")
            if not hangs:
                await self.resume()
        if asleep and await self._sleeping():
            raise AsleepError(f"{self.address.name} answered /wake_up with success, and sleeps on", role="rollout")
        held = await self.weight_version()
        if held != version:
            raise VersionConflictError(
                f"{self.address.name} holds {held!r} after a push of {version!r}", role="rollout"
            )
        return time.perf_counter() - began

    async def _take(self, update_info: dict[str, Any], sending: Sending | None) -> None:
        path, body = "/update_weights", {"update_info": update_info}
        if sending is None:
            await self._call("POST", path, body=body)
        else:
            await sending.beside(self._call("POST", path, body=body, timeout_s=sending.patience_s))

    async def _start_update(self) -> None:
        try:
            await self._call("POST", "/start_weight_update")
        except RoleError:
            # One that failed, or whose sender was killed, may still be open: it is ended under a name that is no
            # version, and the whole of the weights comes after it. Where that fails too, the last call of the sender
            # may have come in between, and ended it.
            with suppress(RoleError):
                await self._call("POST", "/finish_weight_update", body={"weight_version": _UNFINISHED})
            await self._call("POST", "/start_weight_update")

    # HTTP -------------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = _ADMIN_TIMEOUT_S,
        on_sent: Callable[[], None] | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> dict[str, Any]:
        answer = await self._request(
            method, path, body=body, headers=headers, timeout_s=timeout_s, on_sent=on_sent, client=client
        )
        self._check_status(answer.status_code, answer.text, path)
        return object_of(answer, self.address.name, path)

    async def _get(self, path: str) -> Reply:
        """An answer of any status but those that say that the server is away."""
        answer = await self._request("GET", path, timeout_s=_ADMIN_TIMEOUT_S)
        if answer.status_code == 401 or answer.status_code >= 500:
            self._check_status(answer.status_code, answer.text, path)
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: Any = None,
        headers: dict[str, str] | None = None,
        on_sent: Callable[[], None] | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> Reply:
        try:
            if client is not None:
                answer = await client.request(
                    method, path, json=body, headers=headers, timeout=timeout_s, extensions=_extensions(on_sent)
                )
                return Reply(answer.status_code, answer.content)
            data = b"" if body is None else json.dumps(body).encode()
            kind = {"Content-Type": "application/json"} if data else {}
            async with (
                asyncio.timeout(timeout_s),
                self._admin.request(method, path, data, {**kind, **(headers or {})}) as reply,
            ):
                return Reply(reply.status, await reply.read())
        except (httpx.TimeoutException, TimeoutError) as error:
            raise RoleTimeoutError(
                f"{self.address.name} did not answer {path} within {timeout_s:g} s", role="rollout"
            ) from error
        except (httpx.HTTPError, ConnectionLostError) as error:
            raise self._away(error) from error

    def _away(self, error: Exception, partial: Generated | None = None) -> EngineAwayError:
        cause = str(error) or type(error).__name__
        return EngineAwayError(
            f"{self.address.name} at {self.address.url} is away: {cause}", lost=True, partial=partial
        )

    def _check_status(self, status: int, text: str, path: str) -> None:
        name = self.address.name
        # A token that is refused is that of an earlier start of the server, whose address was not read again yet.
        if (refused := status in (401, 403)) or status >= 500:
            raise EngineAwayError(f"{name} answered {path} with {status}: {text[:300]}", lost=refused)
        if status == 409 and LEASE_OVER in text:
            raise LeaseOverError(f"{name} refused {path}: {text[:300]}", lost=True)
        if status >= 400:
            raise EngineRefusedError(f"{name} refused {path} with {status}: {text[:300]}", role="rollout")


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _extensions(on_sent: Callable[[], None] | None) -> dict[str, Any] | None:
    """Has httpx say when a request has left."""
    if on_sent is None:
        return None
    tell = on_sent

    async def trace(event: str, _info: Any) -> None:
        if event.endswith("send_request_body.complete"):
            tell()

    return {"trace": trace}
