"""The request log: what it holds of responses that end, break off or are answered by vLLM's own route."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.wire import codec
from nightshift.wire.errors import WireError
from nightshift.wire.request_log import Served, hash_ids, log_path, parse_line, read_logs
from nightshift.wire.rollout import ROUTE
from services.rollout import streams
from services.rollout.request_log import RequestLogger
from services.rollout.route import GENERATE, Route
from tests.unit.services.rollout.fake_vllm import Call, FakeEngineClient, Inner

PROMPT = [1, 2]


class Server:
    """A route around a fake vLLM, with its log in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inner = Inner()
        self.route = Route(self.inner)
        self.engine = self.route._engine = FakeEngineClient()  # type: ignore[assignment]
        self.route._log = RequestLogger(log_path(folder, "rollout-0"), "rollout-0", "first", lambda: 12.5)

    async def generate(self, request_id: str, flush_tokens: int = 0) -> Call:
        body = {"request_id": request_id, "token_ids": np.array(PROMPT, np.int32), "max_tokens": 9}
        call = Call(self.route, "POST", ROUTE, codec.pack({**body, "flush_tokens": flush_tokens}))
        await turn()
        return call

    async def admin(self, path: str, body: bytes = b"") -> Call:
        call = Call(self.route, "POST", path, body)
        await call.task
        return call

    @property
    def served(self) -> list[Served]:
        return read_logs(self.folder).served


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_LOOK_S", 0.0)
    monkeypatch.setattr(streams, "_LONGEST_LOOK_S", 0.0)


async def test_a_whole_response_is_one_line(tmp_path: Path) -> None:
    server = Server(tmp_path)
    call = await server.generate("run-1.g0000003.1.0")
    server.engine.requests[0].draw(3)
    server.engine.requests[0].end("stop")
    await call.task
    (line,) = server.served
    assert (line.request, line.sample) == ("run-1.g0000003.1.0", "g0000003.1")
    assert (line.prompt, line.prompt_tokens) == (hash_ids(PROMPT), 2)
    assert (line.start, line.end, line.finish) == (0, 3, "stop")
    assert [(span.version, span.hash) for span in line.spans] == [("default", hash_ids([10, 11, 12]))]
    assert (line.server, line.incarnation, line.time) == ("rollout-0", "first", 12.5)


async def test_what_leaves_before_the_end_is_written_before_it_leaves(tmp_path: Path) -> None:
    server = Server(tmp_path)
    call = await server.generate("run.g0000000.0.0", flush_tokens=2)
    (request,) = server.engine.requests
    request.draw(2)
    await turn()
    assert [(line.start, line.end, line.finish) for line in server.served] == [(0, 2, "")]
    request.draw(1)
    call.disconnect()
    await call.task
    assert [(line.start, line.end, line.finish) for line in server.served] == [(0, 2, ""), (2, 2, "gone")]


async def test_each_version_of_a_response_has_a_hash_of_its_own(tmp_path: Path) -> None:
    server = Server(tmp_path)
    call = await server.generate("run.g0000000.0.0")
    (request,) = server.engine.requests
    request.draw(2)
    await server.admin("/update_weights", b"{}")
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    request.draw(3)
    request.end()
    await call.task
    spans = server.served[0].spans
    assert [(span.version, span.start, span.end) for span in spans] == [("default", 0, 2), ("run/0/1", 2, 5)]
    assert [span.hash for span in spans] == [hash_ids([10, 11]), hash_ids([12, 13, 14])]
    assert [taken.version for taken in read_logs(tmp_path).taken] == ["run/0/1"]


async def test_weights_that_were_not_taken_are_not_in_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.inner.status = 500
    await server.admin("/finish_weight_update", b'{"weight_version": "run/0/1"}')
    assert read_logs(tmp_path).taken == []


async def test_a_request_that_fails_is_no_client_that_went_away(tmp_path: Path) -> None:
    server = Server(tmp_path)
    call = await server.generate("run.g0000000.0.0")
    server.engine.requests[0].ended.set_exception(ValueError("too long"))
    await call.task
    assert [(line.end, line.finish) for line in server.served] == [(0, "error")]


class Answer:
    """vLLM's own generate route."""

    def __init__(self, answer: dict[str, Any], status: int = 200) -> None:
        self.body, self.status = json.dumps(answer).encode(), status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"]
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for part in (self.body[:7], self.body[7:]):
            await send({"type": "http.response.body", "body": part, "more_body": part is not self.body[7:]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


CHOICE = {
    "token_ids": [7, 8, 9],
    "finish_reason": "length",
    "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 3}],
}


async def test_the_fall_back_is_written_down_as_well(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.route._app = Answer({"choices": [CHOICE]})
    body = json.dumps({"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}).encode()
    call = Call(server.route, "POST", GENERATE, body, headers={"x-request-id": "run.g0000000.0.0"})
    await call.task
    (line,) = server.served
    assert (line.request, line.prompt, line.finish) == ("run.g0000000.0.0", hash_ids(PROMPT), "length")
    assert [(span.version, span.hash) for span in line.spans] == [("a", hash_ids([7])), ("b", hash_ids([8, 9]))]
    assert json.loads(call.body) == {"choices": [CHOICE]}


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}, 200),
        ({"token_ids": PROMPT, "sampling_params": {}}, 400),
        ({"sampling_params": {}}, 200),
    ],
)
async def test_what_draws_no_sample_is_not_in_it(tmp_path: Path, values: dict[str, Any], status: int) -> None:
    server = Server(tmp_path)
    server.route._app = Answer({"choices": [CHOICE]}, status)
    call = Call(server.route, "POST", GENERATE, json.dumps(values).encode())
    await call.task
    assert call.status == status
    assert server.served == []


async def test_without_a_path_nothing_is_written_and_everything_passes(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.route._log = RequestLogger(None)
    call = await server.generate("run.g0000000.0.0")
    server.engine.requests[0].draw(1)
    server.engine.requests[0].end()
    await call.task
    assert call.complete
    assert server.served == []


def test_a_log_that_cannot_be_written_stops_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLogger(Path("/dev/full"), "rollout-0")
    assert not log.active
    assert "cannot be written" in caplog.text
    log.taken("run/0/1")


def test_a_server_that_restarts_appends_and_half_a_line_is_counted(tmp_path: Path) -> None:
    path = log_path(tmp_path, "rollout-0")
    RequestLogger(path, "rollout-0", "first").taken("run/0/0")
    with path.open("ab") as file:
        file.write(b'{"kind":"tok')
    RequestLogger(path, "rollout-0", "second").taken("run/0/1")
    found = read_logs(tmp_path)
    assert [(taken.version, taken.incarnation) for taken in found.taken] == [
        ("run/0/0", "first"),
        ("run/0/1", "second"),
    ]
    assert found.files == ["requests-rollout-0.jsonl"]
    assert found.unreadable == ["requests-rollout-0.jsonl:3"]


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"kind":"odd"}', b'{"kind":"weights"}', b'{"kind":"tokens","spans":[[1]]}']
)
def test_lines_that_are_no_record(line: bytes) -> None:
    with pytest.raises(WireError, match="no line of a request log"):
        parse_line(line)


def test_the_hash_is_that_of_the_ids_however_they_are_split() -> None:
    assert hash_ids([1, 2, 3]) == hash_ids([1], np.array([2, 3], np.int64)) == hash_ids([1, 2], [], [3])
    assert hash_ids([1, 2, 3]) != hash_ids([1, 3, 2])
