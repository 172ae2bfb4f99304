"""The middleware between the guard and vLLM: its own routes, and what it makes of those that pass."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.wire import codec
from nightshift.wire.experience import VersionSpan
from nightshift.wire.frames import Frame, FrameReader
from nightshift.wire.rollout import INFO, PREFETCH
from nightshift.wire.rollout import ROUTE as GENERATE
from services.rollout import pull, streams
from services.rollout.route import Route
from services.rollout.weights import WeightFileError
from tests.unit.services.rollout.fake_vllm import Call, FakeEngineClient, Inner


class Server:
    """A route around a fake vLLM."""

    def __init__(self, **engine: Any) -> None:
        self.inner = Inner()
        self.route = Route(self.inner)
        self.engine = self.route._engine = FakeEngineClient(**engine)  # type: ignore[assignment]

    def call(self, path: str, body: bytes = b"", method: str = "POST", **more: Any) -> Call:
        return Call(self.route, method, path, body, **more)

    async def admin(self, path: str, body: bytes = b"", **more: Any) -> Call:
        call = self.call(path, body, **more)
        await call.task
        return call

    async def generate(self, flush_tokens: int = 0, request_id: str = "r", **more: Any) -> Call:
        body = {"request_id": request_id, "token_ids": np.array([1, 2], np.int32), "max_tokens": 9}
        call = self.call(GENERATE, codec.pack({**body, "flush_tokens": flush_tokens}), **more)
        await turn()
        return call

    async def version(self) -> str:
        call = self.call(INFO, method="GET")
        await call.task
        return str(json.loads(call.body)["weight_version"])


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def frames_of(call: Call) -> list[Frame]:
    return FrameReader().feed(call.body)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_LOOK_S", 0.0)
    monkeypatch.setattr(streams, "_LONGEST_LOOK_S", 0.0)


@pytest.mark.parametrize(("method", "path"), [("POST", GENERATE), ("GET", INFO), ("POST", "/pause")])
async def test_nothing_is_done_for_a_request_that_did_not_pass_the_guard(method: str, path: str) -> None:
    server = Server()
    call = server.call(path, b"", method, authenticated=False)
    await call.task
    assert call.status == 401
    assert not server.inner.calls


async def test_other_routes_pass_untouched() -> None:
    server = Server()
    call = await server.admin("/start_weight_update", b"{}")
    assert call.status == 200
    assert server.inner.calls == [("/start_weight_update", b"{}")]


async def test_without_flushing_one_frame_comes_at_the_end() -> None:
    server = Server()
    call = await server.generate()
    (request,) = server.engine.requests
    assert request.ids == [1, 2]
    assert request.sampling.max_tokens == 9
    request.draw(5)
    await turn()
    assert not call.messages
    request.end("stop", [VersionSpan("default", 0, 5)])
    await call.task
    (frame,) = frames_of(call)
    assert frame.ids.tolist() == [10, 11, 12, 13, 14]
    assert frame.logprobs.tolist() == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert (frame.start, frame.finish_reason, frame.request_id) == (0, "stop", "r")
    assert frame.versions == frame.engine_versions == [VersionSpan("default", 0, 5)]
    assert call.status == 200
    assert call.complete
    assert not request.cancelled


async def test_a_frame_leaves_after_so_many_tokens() -> None:
    server = Server()
    call = await server.generate(flush_tokens=4)
    (request,) = server.engine.requests
    request.draw(3)
    await turn()
    assert not call.messages
    request.draw(2)
    await turn()
    assert [(f.start, f.end, f.last) for f in frames_of(call)] == [(0, 5, False)]
    request.draw(1)
    request.end()
    await call.task
    assert [(f.start, f.end, f.last) for f in frames_of(call)] == [(0, 5, False), (5, 6, True)]


async def test_requests_share_cached_prefixes_with_those_of_the_same_weights_alone() -> None:
    server = Server()
    await server.generate(request_id="before")
    await server.admin("/pause", b"")
    await server.generate(request_id="while paused")
    await server.admin("/update_weights", b"{}")
    await server.generate(request_id="under the update")
    await server.admin("/update_weights", b"{}")  # further weights of the same update
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    await server.admin("/resume")
    await server.generate(request_id="after")
    await server.admin("/update_weights", b"{}")
    await server.admin("/resume")  # broke off: what is computed now is neither of the old weights nor of the new
    await server.generate(request_id="mixed")
    await server.admin("/update_weights", b"{}")
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/2"}')
    await server.generate(request_id="last")
    salts = {request.request_id: request.salt for request in server.engine.requests}
    assert salts["before"] == salts["while paused"] == ""
    assert salts["under the update"] == salts["after"]
    assert len({salts[name] for name in ("before", "after", "mixed", "last")}) == 4


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
async def test_requests_to_vllms_own_routes_are_salted_from_the_first_update_on(path: str) -> None:
    server = Server()
    own = b'{"prompt": [1], "cache_salt": "mine"}'
    await server.admin(path, own)
    assert server.inner.calls[-1] == (path, own)
    await server.admin("/update_weights", b"{}")
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    for body, salt in ((b'{"prompt": [1]}', "update-1"), (own, "update-1/mine")):
        await server.admin(path, body)
        assert json.loads(server.inner.calls[-1][1]) == {"prompt": [1], "cache_salt": salt}
    for refused in (b"{", b"[1]", b'{"cache_salt": ""}', b'{"cache_salt": 3}'):
        await server.admin(path, refused)
        assert server.inner.calls[-1] == (path, refused)


async def test_a_pause_lets_everything_leave() -> None:
    server = Server()
    streamed, whole = await server.generate(flush_tokens=100, request_id="a"), await server.generate(request_id="b")
    for request in server.engine.requests:
        request.draw(3)
    await server.admin("/pause")
    await turn()
    assert server.engine.settled == 1
    assert [frame.end for frame in frames_of(streamed)] == [3]
    assert not whole.messages
    for request in server.engine.requests:
        request.end()
    await asyncio.gather(streamed.task, whole.task)


async def test_the_versions_change_where_the_update_began() -> None:
    server = Server()
    call = await server.generate(flush_tokens=100)
    (request,) = server.engine.requests
    request.draw(2)
    server.engine.on_settle = lambda: request.draw(1)  # tokens that the answer to the pause has overtaken
    await server.admin("/pause")
    server.engine.on_settle = None
    await server.admin("/start_weight_update")
    await server.admin("/update_weights", b'{"update_info": {}}')
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    assert await server.version() == "run/0/1"
    await server.admin("/resume")
    request.draw(4)
    request.end(spans=[VersionSpan("default", 0, 3), VersionSpan("run/0/1", 3, 7)])
    await call.task
    first, last = frames_of(call)
    assert first.versions == [VersionSpan("default", 0, 3)]
    assert last.versions == [VersionSpan("run/0/1", 3, 7)]
    assert server.inner.calls[3] == ("/finish_weight_update", b'{"weight_version": "run/0/1"}')


async def test_a_vllm_that_keeps_no_version_is_not_sent_one() -> None:
    server = Server(names_weights=False)
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    assert server.inner.calls == [("/finish_weight_update", b"")]
    assert await server.version() == "run/0/1"


async def test_a_finish_that_fails_gives_no_version_and_a_resume_makes_it_unknown() -> None:
    server = Server()
    call = await server.generate()
    (request,) = server.engine.requests
    request.draw(2)
    await server.admin("/update_weights", b"{}")
    server.inner.status = 500
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    assert await server.version() == "default"
    server.inner.status = 200
    await server.admin("/resume")
    assert await server.version() == ""
    request.draw(1)
    request.end()
    await call.task
    assert frames_of(call)[0].versions == [VersionSpan("default", 0, 2), VersionSpan("", 2, 3)]


@pytest.mark.parametrize(("query", "held"), [(b"level=2&mode=abort", ""), (b"level=1", "default"), (b"", "default")])
async def test_weights_that_were_slept_away_have_no_version_until_the_next_update(query: bytes, held: str) -> None:
    server = Server()
    await server.admin("/sleep", query=query)
    await server.admin("/wake_up")
    await server.admin("/resume")
    assert await server.version() == held
    for path in ("/sleep", "/wake_up", "/update_weights"):
        await server.admin(path, query=query)
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    await server.admin("/resume")
    assert await server.version() == "run/0/1"
    assert [path for path, _ in server.inner.calls[:2]] == ["/sleep", "/wake_up"]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"no json", b'{"weight_version": 3}'])
async def test_an_update_without_a_name_leaves_the_weights_unknown(body: bytes) -> None:
    server = Server()
    await server.admin("/finish_weight_update", body)
    assert await server.version() == ""


async def test_a_client_that_goes_ends_its_request() -> None:
    server = Server()
    call = await server.generate(flush_tokens=2)
    (request,) = server.engine.requests
    call.disconnect()
    await call.task
    assert request.cancelled
    assert not server.route._streams.requests


async def test_a_refused_request_is_a_400_and_a_broken_engine_a_500() -> None:
    server = Server()
    for error, status in ((ValueError("too long"), 400), (RuntimeError("engine dead"), 500)):
        call = await server.generate()
        server.engine.requests[-1].ended.set_exception(error)
        await call.task
        assert call.status == status
        assert str(error) in call.body.decode()
    server.engine.refuse = ValueError("min_tokens above max_tokens")
    call = await server.generate()
    await call.task
    assert call.status == 400


async def test_an_engine_that_breaks_behind_the_first_frame_says_so_in_the_last() -> None:
    server = Server()
    call = await server.generate(flush_tokens=2)
    (request,) = server.engine.requests
    request.draw(2)
    await turn()
    request.ended.set_exception(RuntimeError("engine dead"))
    await call.task
    first, last = frames_of(call)
    assert (first.end, last.finish_reason, last.start, len(last.ids)) == (2, "error", 2, 0)
    assert "engine dead" in last.error


async def test_an_abort_hands_out_the_prefix() -> None:
    server = Server()
    call = await server.generate()
    (request,) = server.engine.requests
    request.draw(3)
    request.end("abort")
    await call.task
    (frame,) = frames_of(call)
    assert (frame.end, frame.finish_reason) == (3, "abort")


async def test_two_requests_of_one_name_are_two_in_the_engine() -> None:
    server = Server()
    calls = [await server.generate(), await server.generate()]
    assert len({request.request_id for request in server.engine.requests}) == 2
    for request in server.engine.requests:
        request.end()
    for call in calls:
        await call.task
        assert frames_of(call)[0].request_id == "r"


async def test_the_trace_context_is_passed_on() -> None:
    server = Server()
    call = await server.generate(headers={"traceparent": "00-aa-bb-01"})
    (request,) = server.engine.requests
    assert request.trace == {"traceparent": "00-aa-bb-01"}
    request.end()
    await call.task


GOOD: dict[str, Any] = {"request_id": "r", "token_ids": np.array([1], np.int32), "max_tokens": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None},
        {"token_ids": np.array([], np.int32)},
        {"token_ids": np.array([-1], np.int32)},
        {"token_ids": np.array([1], np.int64)},
        {"token_ids": [1.5]},
        {"token_ids": [True]},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"max_tokens": True},
        {"request_id": ""},
        {"request_id": 3},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"seed": -1},
        {"seed": 1.5},
        {"flush_tokens": -1},
        {"min_tokens": "1"},
        {"ignore_eos": 1},
        {"stop_token_ids": 3},
        {"unknown": 1},
    ],
)
async def test_a_malformed_request_is_a_400_that_names_the_field(changes: dict[str, Any]) -> None:
    server = Server()
    call = await server.admin(GENERATE, codec.pack(GOOD | changes))
    assert call.status == 400
    assert next(iter(changes)) in call.body.decode()
    assert not server.engine.requests


@pytest.mark.parametrize("body", [b"", b"{}", codec.pack([1]), codec.pack(None)])
async def test_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    call = await Server().admin(GENERATE, body)
    assert call.status == 400


async def test_weights_are_fetched_while_decoding_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pull.URL_VARIABLE, "http://trainer/weights")
    monkeypatch.setenv(pull.CACHE_VARIABLE, str(tmp_path / "cache"))
    fetched = []
    monkeypatch.setattr(pull, "fetch", lambda *given: fetched.append(given))
    server = Server()
    file = {"path": "3.safetensors", "bytes": 7, "digest": "a" * 64}
    source = {"url": "http://trainer:80/weights", "token": "t"}
    call = await server.admin(PREFETCH, json.dumps({"init_info": source, "update_info": file}).encode())
    assert call.status == 200
    expected = pull.Source("http://trainer:80/weights", "t"), pull.RemoteFile("3.safetensors", 7, "a" * 64)
    assert fetched == [(*expected, tmp_path / "cache")]
    assert not server.inner.calls


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "prefetch:"),
        (b"[]", 400, "prefetch:"),
        (b'{"init_info": {}, "update_info": {}}', 400, "prefetch:"),
        (b'{"init_info": {"url": "http://elsewhere"}, "update_info": {}}', 400, "NIGHTSHIFT_WEIGHT_URL allows"),
        (
            b'{"init_info": {"url": "http://trainer"}, "update_info": {"path": "../x"}}',
            400,
            "a name that none can have",
        ),
        (
            b'{"init_info": {"url": "http://trainer"}, "update_info": {"path": "1.safetensors", "bytes": 1, "digest": "'
            + b"0" * 64
            + b'"}}',
            422,
            "the weight server refuses the token",
        ),
    ],
)
async def test_weights_that_cannot_be_fetched_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, status: int, text: str
) -> None:
    def refused(*_given: object) -> None:
        raise WeightFileError("the weight server refuses the token")

    monkeypatch.setenv(pull.URL_VARIABLE, "http://trainer")
    monkeypatch.setenv(pull.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(pull, "fetch", refused)
    call = await Server().admin(PREFETCH, body)
    assert call.status == status
    assert text in json.loads(call.body)["error"]["message"]
