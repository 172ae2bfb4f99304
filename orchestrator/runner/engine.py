"""Client of one vLLM server: token ids in, token ids out, and the weight-transfer phases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from nightshift.wire.errors import RoleError, RoleTimeoutError, VersionConflictError
from nightshift.wire.experience import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Floats, Ids, VersionSpan

#: A log-prob may exceed 0 by rounding alone; more than this is a broken server.
_ROUNDING = 1e-4
_ADMIN_TIMEOUT_S = 60.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
GENERATE = "/inference/v1/generate"


class EngineAwayError(RoleError):
    """The server did not answer, or answered that it cannot now: the request may be sent again.

    ``lost`` says that there was no connection, or one to another start of the server.
    """

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message, role="rollout")
        self.lost = lost


class EngineRefusedError(RoleError):
    """The server refused the request itself (4xx): sending it again would not help."""


class InvalidAnswerError(RoleError):
    """The server answered with something that cannot be trained on; ``kind`` counts it."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message, role="rollout")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sample to be drawn."""

    request_id: str
    prompt_ids: Ids  # [P] int32
    max_tokens: int
    temperature: float  # 0 is greedy
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """One drawn response of T tokens."""

    response_ids: Ids  # [T] int32
    logprobs: Floats  # [T] float32
    versions: list[VersionSpan]
    finish_reason: str


@dataclass(slots=True)
class EngineAddress:
    """Where a server is, and which start of it."""

    name: str
    url: str
    token: str
    incarnation: str
    weight_backend: str = "safetensors"
    init_info: dict[str, Any] = field(default_factory=dict)


class Engine:
    """One server. All calls have a deadline; errors say whether sending again can help."""

    def __init__(self, address: EngineAddress, request_timeout_s: float, connections: int = 256) -> None:
        self.address = address
        self._timeout_s = request_timeout_s
        self._http = httpx.AsyncClient(
            base_url=address.url,
            headers={"Authorization": f"Bearer {address.token}"},
            timeout=httpx.Timeout(request_timeout_s, connect=5.0, pool=None),
            # A proxy of the environment is meant for the outside, and cannot reach this machine's loopback.
            trust_env=httpx.URL(address.url).host not in _LOOPBACK,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def generate(self, request: GenerateRequest, on_sent: Callable[[], None] | None = None) -> Generated:
        """Draws one sample. ``on_sent`` is called when the request has left.

        Raises:
            EngineAwayError: connection lost, 5xx or time-out: send again.
            EngineRefusedError: 4xx.
            InvalidAnswerError: the answer is not that of this request, or its log-probs are unusable.
        """
        sampling: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(request.stop_token_ids),
        }
        if request.seed is not None:
            sampling["seed"] = request.seed
        headers = {"X-Request-Id": request.request_id}
        if request.traceparent:
            headers["traceparent"] = request.traceparent
        body = {"token_ids": request.prompt_ids.tolist(), "sampling_params": sampling}
        answer = await self._call(
            "POST", GENERATE, body=body, headers=headers, timeout_s=self._timeout_s, on_sent=on_sent
        )
        return parse_generated(answer, request.request_id)

    async def score(self, prompt_ids: Ids, response_ids: Ids) -> Floats:
        """Log-probs [T] of the response tokens under the server's weights, at temperature 1."""
        ids = [*prompt_ids.tolist(), *response_ids.tolist()]
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}}
        answer = await self._call("POST", GENERATE, body=body, timeout_s=self._timeout_s)
        rows = answer.get("prompt_logprobs") or []
        if len(rows) != len(ids):
            raise InvalidAnswerError(f"{self.address.name} scored {len(rows)} of {len(ids)} tokens", "probe")
        wanted = range(len(prompt_ids), len(ids))
        try:
            return np.array([rows[at][str(ids[at])]["logprob"] for at in wanted], dtype=np.float32)
        except (KeyError, TypeError) as error:
            raise InvalidAnswerError(f"{self.address.name} left out the log-prob of a token", "probe") from error

    async def healthy(self) -> bool:
        """Whether the server answers its health check."""
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def weight_version(self) -> str:
        """The version that the server says it holds."""
        return str((await self._call("GET", "/weight_info")).get("weight_version", ""))

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Prepares the weight transfer; once per start of the server."""
        await self._call("POST", "/init_weight_transfer_engine", body={"init_info": info})

    async def pause(self, mode: str = "keep") -> None:
        """Stops decoding; running requests are kept ("keep") or waited for ("wait")."""
        await self._call("POST", f"/pause?mode={mode}", timeout_s=self._timeout_s)

    async def resume(self) -> None:
        """Goes on decoding. Asked twice: after a failed phase a server closes the connection that the first may use."""
        try:
            await self._call("POST", "/resume")
        except EngineAwayError:
            await self._call("POST", "/resume")

    async def push(self, update_info: dict[str, Any], version: str, *, mode: str = "keep") -> float:
        """Takes new weights under running requests; returns the seconds for which decoding stood still.

        After any failure the server is resumed with the weights it has, so that nothing waits for ever; whether they
        may be used is for the caller's probe to say.

        Raises:
            RoleError: a phase failed; the message names it.
        """
        began = time.perf_counter()
        await self.pause(mode)
        try:
            await self._call("POST", "/start_weight_update")
            await self._call("POST", "/update_weights", body={"update_info": update_info})
            await self._call("POST", "/finish_weight_update", body={"weight_version": version})
        finally:
            await self.resume()
        held = await self.weight_version()
        if held != version:
            raise VersionConflictError(
                f"{self.address.name} holds {held!r} after a push of {version!r}", role="rollout"
            )
        return time.perf_counter() - began

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = _ADMIN_TIMEOUT_S,
        on_sent: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        name = self.address.name

        async def trace(event: str, _info: Any) -> None:
            if on_sent is not None and event.endswith("send_request_body.complete"):
                on_sent()

        extensions = {"trace": trace} if on_sent is not None else None
        try:
            answer = await self._http.request(
                method, path, json=body, headers=headers, timeout=timeout_s, extensions=extensions
            )
        except httpx.TimeoutException as error:
            raise RoleTimeoutError(f"{name} did not answer {path} within {timeout_s:g} s", role="rollout") from error
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise EngineAwayError(f"{name} at {self.address.url} is away: {cause}", lost=True) from error
        # A token that is refused is that of an earlier start of the server, whose address was not read again yet.
        if (refused := answer.status_code in (401, 403)) or answer.status_code >= 500:
            raise EngineAwayError(
                f"{name} answered {path} with {answer.status_code}: {answer.text[:300]}", lost=refused
            )
        if answer.status_code >= 400:
            raise EngineRefusedError(
                f"{name} refused {path} with {answer.status_code}: {answer.text[:300]}", role="rollout"
            )
        try:
            value = answer.json() if answer.content else {}
        except ValueError as error:
            raise EngineAwayError(f"{name} answered {path} with something else than JSON") from error
        return value if isinstance(value, dict) else {}


def parse_generated(answer: dict[str, Any], request_id: str) -> Generated:
    """Checks and reads the answer to a generate request.

    Raises:
        InvalidAnswerError: wrong request id, log-probs that are missing, null, positive or not one per token, ids that
            disagree with the log-probs', version spans that leave a gap, an unknown finish reason.
        EngineAwayError: the server aborted the request.
    """
    answered = str(answer.get("request_id", ""))
    if answered.removeprefix("generate-tokens-") != request_id:
        raise InvalidAnswerError(f"asked for {request_id}, answered {answered!r}", "request_id")
    try:
        choice = _only_choice(answer, request_id)
        if choice.get("finish_reason") == FINISH_ABORT:
            raise EngineAwayError(f"{request_id} was aborted by the server")
        if choice.get("finish_reason") not in (FINISH_STOP, FINISH_LENGTH):
            raise InvalidAnswerError(f"{request_id}: finish reason {choice.get('finish_reason')!r}", "finish_reason")
        ids = choice.get("token_ids") or []
        if any(type(token) is not int or token < 0 for token in ids):
            raise InvalidAnswerError(f"{request_id}: token ids {ids}", "token_ids")
        return Generated(
            response_ids=np.array(ids, dtype=np.int32),
            logprobs=_logprobs(choice, ids, request_id),
            versions=_spans(choice, len(ids), request_id),
            finish_reason=str(choice["finish_reason"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidAnswerError(f"{request_id}: malformed answer: {type(error).__name__}: {error}", "form") from error


def _only_choice(answer: dict[str, Any], request_id: str) -> dict[str, Any]:
    choices = answer.get("choices") or []
    if len(choices) != 1:
        raise InvalidAnswerError(f"{request_id}: {len(choices)} choices for one sample", "choices")
    return dict(choices[0])


def _logprobs(choice: dict[str, Any], ids: list[int], request_id: str) -> Floats:
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(ids):
        raise InvalidAnswerError(f"{request_id}: {len(content)} log-probs for {len(ids)} tokens", "logprobs")
    values = [entry.get("logprob") for entry in content]
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value) or value > _ROUNDING:
            raise InvalidAnswerError(f"{request_id}: log-prob {value!r}", "logprobs")
    if any(entry.get("token_id", token) != token for entry, token in zip(content, ids, strict=True)):
        raise InvalidAnswerError(f"{request_id}: log-probs of other tokens than the sampled ones", "logprobs")
    return np.minimum(np.array(values, dtype=np.float32), np.float32(0))


def _spans(choice: dict[str, Any], tokens: int, request_id: str) -> list[VersionSpan]:
    spans = [
        VersionSpan(str(span["version"]), int(span["start"]), int(span["end"]))
        for span in choice.get("weight_versions") or []
    ]
    ends = [0, *(span.end for span in spans)]
    if tokens and (ends[-1] != tokens or any(span.start != at for span, at in zip(spans, ends, strict=False))):
        raise InvalidAnswerError(f"{request_id}: version spans {spans} for {tokens} tokens", "versions")
    return spans
