"""The guard in front of vLLM's routes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.guard import OPEN_ROUTES, TOKEN_ROUTES, TOKEN_VARIABLE, Guard, decide

TOKEN = "s3cret-token"
REFUSED = [
    "/collective_rpc",
    "/invocations",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sleep",
    "/wake_up",
    "/tokenize",
    "/server_info",
    "/v1/chat/completions",
    "/docs",
    "/",
    "/pause/",
    "//pause",
    "/PAUSE",
    "/health/../pause",
    "/health/x",
]


@pytest.mark.parametrize("path", OPEN_ROUTES)
def test_probes_need_no_token(path):
    assert decide("GET", path, [], b"t") == 200
    assert decide("POST", path, [b"Bearer t"], b"t") == 405


@pytest.mark.parametrize("path", TOKEN_ROUTES)
def test_a_used_route_needs_the_token_and_its_own_method(path):
    method = "POST" if "POST" in TOKEN_ROUTES[path] else "GET"
    assert decide(method, path, [b"Bearer t"], b"t") == 200
    assert decide(method, path, [b"bearer t"], b"t") == 200
    assert decide(method, path, [], b"t") == 401
    assert decide("DELETE", path, [b"Bearer t"], b"t") == 405


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_used_does_not_exist_even_with_the_token(path):
    assert decide("POST", path, [b"Bearer t"], b"t") == 403
    assert decide("POST", path, [], b"t") == 401


@pytest.mark.parametrize(
    "headers",
    [[], [b""], [b"t"], [b"Basic t"], [b"Bearer "], [b"Bearer tt"], [b"Bearer t", b"Bearer t"], [b"Bearer\xff\xfet"]],
)
def test_only_one_right_bearer_token_is_accepted(headers):
    assert decide("POST", "/pause", headers, b"t") == 401


@given(st.text(), st.text(max_size=20), st.lists(st.binary(max_size=20), max_size=2))
def test_nothing_without_the_token_passes_but_probes(method, path, headers):
    if decide(method, path, headers, b"a long token that is not guessed") == 200:
        assert path in OPEN_ROUTES


async def call(monkeypatch, scope, token=TOKEN):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope)

    async def receive():
        raise AssertionError("the guard reads no body")

    async def send(message):
        sent.append(message)

    await Guard(app)(scope, receive, send)
    return passed, sent


def http(path, method="POST", headers=()):
    return {"type": "http", "method": method, "path": path, "headers": list(headers)}


async def test_a_request_with_the_token_reaches_the_server_untouched(monkeypatch):
    scope = http("/pause", headers=[(b"Authorization", f"Bearer {TOKEN}".encode())])
    passed, sent = await call(monkeypatch, scope)
    assert passed == [scope]
    assert sent == []


async def test_a_refusal_is_a_json_error_that_tells_nothing_of_the_token(monkeypatch):
    passed, sent = await call(monkeypatch, http("/pause", headers=[(b"authorization", b"Bearer no")]))
    assert passed == []
    start, body = sent
    assert start["status"] == 401
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == 401
    assert TOKEN.encode() not in body["body"]


async def test_websockets_are_refused_and_the_lifespan_passes(monkeypatch):
    passed, sent = await call(monkeypatch, {"type": "websocket", "path": "/v1/realtime", "headers": []})
    assert passed == []
    assert sent[0]["type"] == "websocket.close"
    passed, _ = await call(monkeypatch, {"type": "lifespan"})
    assert passed == [{"type": "lifespan"}]


def test_without_a_token_the_server_does_not_start(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=TOKEN_VARIABLE):
        Guard(None)
