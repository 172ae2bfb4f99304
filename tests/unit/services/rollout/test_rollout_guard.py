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
    "/release_kv_cache_memory",
    "/sleep/",
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


class Lender:
    """A guard in front of a server that answers nothing, and the statuses of requests that carry leases."""

    def __init__(self, monkeypatch):
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        self.guard = Guard(self.app)
        self.passed = 0

    async def app(self, scope, receive, send):
        self.passed += 1

    async def ask(self, path, *leases, method="POST", token=TOKEN):
        """200 for a request that reached the server; else status, type and message of the refusal."""
        sent, before = [], self.passed

        async def send(message):
            sent.append(message)

        headers = [(b"authorization", f"Bearer {token}".encode())]
        headers += [(b"X-Nightshift-Lease", lease.encode()) for lease in leases]
        await self.guard(http(path, method, headers), None, send)
        if self.passed > before:
            assert not sent
            return 200
        error = json.loads(sent[1]["body"])["error"]
        return sent[0]["status"], error["type"], error["message"]


async def test_an_older_lease_can_neither_push_nor_draw(monkeypatch):
    server = Lender(monkeypatch)
    writes = [path for path, methods in TOKEN_ROUTES.items() if "POST" in methods]
    for path in writes:
        assert await server.ask(path, "5.7") == 200
    assert await server.ask("/pause", "5.8") == 200
    for path in writes:
        status, kind, message = await server.ask(path, "5.7")
        assert (status, kind) == (409, "lease_over")
        assert "lease 5.7 of this server is over: it works for lease 5.8 now" in message
        assert await server.ask(path, "5.8") == 200
    assert (await server.ask("/pause", "4.100"))[0] == 409, "of a fleet that was made before"
    assert await server.ask("/pause", "6.1") == 200, "of one that was made later"
    assert (await server.ask("/pause", "5.8"))[0] == 409


async def test_what_only_asks_and_what_has_no_lease_is_not_fenced(monkeypatch):
    server = Lender(monkeypatch)
    assert await server.ask("/pause", "5.8") == 200
    for path, methods in TOKEN_ROUTES.items():
        if "GET" in methods:
            assert await server.ask(path, "5.7", method="GET") == 200
    assert await server.ask("/v1/completions") == 200
    assert await server.ask("/pause", "5.8") == 200


@pytest.mark.parametrize("leases", [[""], ["5"], ["5."], ["x.y"], ["-1.2"], ["5.7", "5.8"], ["1.1" * 20], ["５.７"]])
async def test_a_lease_that_is_none_is_refused_and_not_remembered(monkeypatch, leases):
    server = Lender(monkeypatch)
    text = [lease.encode().decode("latin-1") for lease in leases]
    status, kind, message = await server.ask("/pause", *text)
    assert (status, kind) == (400, "bad_lease")
    assert "expected EPOCH.NUMBER" in message
    assert await server.ask("/pause", "0.1") == 200


async def test_who_has_no_token_moves_no_fence(monkeypatch):
    server = Lender(monkeypatch)
    assert (await server.ask("/pause", "9.9", token="guess"))[0] == 401
    assert (await server.ask("/nosuch", "9.9"))[0] == 403
    assert await server.ask("/pause", "1.1") == 200


def test_without_a_token_the_server_does_not_start(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=TOKEN_VARIABLE):
        Guard(None)
