"""The compatibility layer against the shapes of vLLM's versions; the facts are in tests/fakes/vllm_routes.json."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import VersionSpan
from services.rollout.compat import EngineClient, Sampling, check_version, version_flags

TABLE = json.loads((Path(__file__).parents[3] / "fakes" / "vllm_routes.json").read_text())


class Flat:
    """vLLM's flat container; ``width`` entries a position, the sampled token's first."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.start_indices: list[int] = []
        self.logprobs: list[float] = []

    def add(self, value: float) -> None:
        self.start_indices.append(len(self.logprobs))
        self.logprobs += [value, *[-99.0] * (self.width - 1)]


class State:
    """vLLM's record of a running request."""

    def __init__(self, width: int) -> None:
        self.ids: list[int] = []
        self.logprobs_processor = SimpleNamespace(logprobs=Flat(width))
        self.detokenizer = self

    @property
    def output_token_ids(self) -> list[int]:
        return self.ids

    def num_output_tokens(self) -> int:
        return len(self.ids)

    def add(self, tokens: int) -> None:
        for _ in range(tokens):
            self.logprobs_processor.logprobs.add(-float(len(self.ids)))
            self.ids.append(len(self.ids) + 10)


class Client:
    """An engine client that draws ten tokens, three at a time."""

    def __init__(self, width: int, readable: bool, spans: bool) -> None:
        self.state, self.spans = State(width), spans
        self.asked: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(weight_transfer_config=object())
        if readable:
            self.output_processor = SimpleNamespace(request_states={}, external_req_ids=defaultdict(list))
        self.readable = readable

    async def finish_weight_update(self) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return True

    async def generate(self, prompt: Any, params: Any, request_id: str, *, trace_headers: Any) -> Any:
        self.asked = {"prompt": prompt, "params": params, "trace": trace_headers}
        if self.readable:
            self.output_processor.request_states["internal"] = self.state
            self.output_processor.external_req_ids[request_id].append("internal")
        for tokens in (3, 3, 3, 1):
            before = len(self.state.ids)
            self.state.add(tokens)
            if not self.readable:
                part = [{t: SimpleNamespace(logprob=-float(t - 10))} for t in self.state.ids]
                yield self.output(self.state.ids[before:], part)  # with all log-probs so far, as 0.26 may do
        if self.readable:
            self.output_processor.request_states.clear()
            self.output_processor.external_req_ids.clear()
        ids = self.state.ids if self.readable else []
        yield self.output(ids, self.state.logprobs_processor.logprobs if self.readable else [], "stop")

    def output(self, ids: list[int], logprobs: Any, finish: str | None = None) -> Any:
        fields = {"token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
        if self.spans:
            fields["weight_versions"] = [SimpleNamespace(version="v", start=0, end=10)] if finish else None
        return SimpleNamespace(outputs=[SimpleNamespace(**fields)])


def tokens_input(ids: list[int], *, cache_salt: str | None = None) -> dict[str, Any]:
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    return {"type": "token", "prompt_token_ids": ids, **salt}


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself takes seconds to import."""
    vllm, inputs, sampling = ModuleType("vllm"), ModuleType("vllm.inputs"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    inputs.tokens_input = tokens_input  # type: ignore[attr-defined]
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final", DELTA="delta")  # type: ignore[attr-defined]
    for module in (vllm, inputs, sampling):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def engine(width: int = 1, readable: bool = True, spans: bool = True) -> tuple[EngineClient, Client]:
    client = Client(width, readable, spans)
    routes = [SimpleNamespace(path=path) for path in TABLE["0.26.0"]["routes"]] + [SimpleNamespace()]
    return EngineClient(SimpleNamespace(state=SimpleNamespace(engine_client=client), routes=routes)), client


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("spans", [True, False])
async def test_ids_and_log_probs_are_the_sampled_tokens(width: int, readable: bool, spans: bool) -> None:
    face, client = engine(width, readable, spans)
    request = face.request([1, 2], Sampling(max_tokens=10), "r", None)
    outcome = await request.run()
    ids, logprobs = request.tokens(0, request.count())
    assert ids.tolist() == list(range(10, 20))
    assert logprobs.tolist() == [-float(at) for at in range(10)]
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert request.tokens(4, 6)[0].tolist() == [14, 15]
    assert outcome.finish_reason == "stop"
    assert outcome.engine_versions == ([VersionSpan("v", 0, 10)] if spans else None)
    assert client.asked["params"].output_kind == ("final" if readable else "delta")
    assert client.asked["prompt"] == {"type": "token", "prompt_token_ids": [1, 2]}


@pytest.mark.parametrize("width", [1, 3])
async def test_a_running_request_can_be_read(width: int) -> None:
    face, client = engine(width)
    request = face.request([1, 2], Sampling(max_tokens=10), "r", None)
    assert request.count() == 0
    client.state.add(4)
    client.output_processor.request_states["internal"] = client.state
    client.output_processor.external_req_ids["r"].append("internal")
    assert request.count() == 4
    ids, logprobs = request.tokens(1, 3)
    assert (ids.tolist(), logprobs.tolist()) == ([11, 12], [-1.0, -2.0])


async def test_sampling_parameters_reach_vllm() -> None:
    face, client = engine()
    sampling = Sampling(7, 0.5, (2, 3), 11, 1, True)
    await face.request([1], sampling, "r", {"traceparent": "t"}).run()
    params = client.asked["params"]
    assert (params.max_tokens, params.temperature, params.stop_token_ids) == (7, 0.5, [2, 3])
    assert (params.seed, params.min_tokens, params.ignore_eos) == (11, 1, True)
    assert (params.logprobs, params.flat_logprobs, params.detokenize) == (0, True, False)
    assert client.asked["trace"] == {"traceparent": "t"}


async def test_a_salt_reaches_vllm_where_it_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    face, client = engine()
    await face.request([1], Sampling(7), "r", None, "update-1").run()
    assert client.asked["prompt"] == {"type": "token", "prompt_token_ids": [1], "cache_salt": "update-1"}
    monkeypatch.setattr(sys.modules["vllm.inputs"], "tokens_input", lambda ids: {"prompt_token_ids": ids})
    face, client = engine()
    assert not face.salts
    await face.request([1], Sampling(7), "r", None, "update-1").run()
    assert client.asked["prompt"] == {"prompt_token_ids": [1]}


async def test_only_the_trace_context_is_taken_from_the_headers() -> None:
    face, _ = engine()
    assert await face.trace_headers({"traceparent": "t", "authorization": "x"}) == {"traceparent": "t"}
    assert await face.trace_headers({"authorization": "x"}) is None


def test_capabilities_follow_the_routes_and_the_configuration() -> None:
    face, client = engine()
    sys.modules["vllm.outputs"] = ModuleType("vllm.outputs")
    try:
        sys.modules["vllm.outputs"].CompletionOutput = SimpleNamespace(__dataclass_fields__={})  # type: ignore[attr-defined]
        assert not face.names_weights
        found = face.capabilities()
        assert found["pause"]
        assert found["keep_cache"]
        assert found["update_phases"]
        assert not found["weight_versions_spans"]
        assert found["weight_version"]
        assert not found["sleep"]  # the routes are there, and without the flag they give no memory back
        client.vllm_config.model_config = SimpleNamespace(enable_sleep_mode=True)
        assert face.capabilities()["sleep"]
        face._app.state.args = SimpleNamespace(api_server_count=2)
        assert not face.capabilities()["weight_version"]
        client.vllm_config.weight_transfer_config = SimpleNamespace(backend="nccl")
        assert face.weight_backend == "nccl"
        client.vllm_config.weight_transfer_config = None
        assert face.weight_backend == ""
        assert not face.capabilities()["update_phases"]
    finally:
        del sys.modules["vllm.outputs"]


@pytest.mark.parametrize("version", sorted(TABLE))
def test_the_layer_finds_what_it_uses_in_every_version(version: str) -> None:
    facts = TABLE[version]
    assert {"prompt", "sampling_params", "request_id", "trace_headers"} <= set(facts["generate_arguments"])
    assert facts["flat_logprobs"]
    assert facts["final_only"]
    assert facts["request_states"]
    major, minor, _ = map(int, version.split("."))
    assert ("--enable-scale-out" in version_flags((major, minor))) == facts["scale_out_flag"]


@pytest.mark.parametrize("version", [(0, 25), (0, 34), (1, 0)])
def test_a_version_outside_the_range_is_refused_before_it_is_started(version: tuple[int, int]) -> None:
    with pytest.raises(BadInputError, match=r"outside 0\.26 to 0\.33"):
        check_version(version)
    check_version((0, 26))
    check_version(None)
