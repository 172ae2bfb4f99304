"""Weights over HTTP: the weight server on loopback, and the rollout server's side that fetches from it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from nightshift.wire.errors import RoleError
from services.rollout import pull
from services.rollout.weights import WeightFileError
from services.trainer.weight_server import WeightServer

DATA = os.urandom(3 << 20)


def described(data: bytes = DATA, name: str = "7.safetensors") -> pull.RemoteFile:
    return pull.RemoteFile(name, len(data), blake3(data).hexdigest())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "7.safetensors").write_bytes(DATA)
    (folder / ".8.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    return folder


@pytest.fixture
def server(store: Path) -> Iterator[WeightServer]:
    server = WeightServer(store)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def get(server: WeightServer, name: str, token: str | None = None, **headers: str) -> httpx.Response:
    headers["Authorization"] = f"Bearer {server.token if token is None else token}"
    return httpx.get(f"{server.url}/{name}", headers=headers, trust_env=False)


def test_a_published_file_is_fetched_whole(server: WeightServer, cache: Path) -> None:
    path = pull.fetch(pull.Source(server.url, server.token), described(), cache, deadline_s=20)
    assert path == cache / "7.safetensors"
    assert path.read_bytes() == DATA


def test_ranges_are_served(server: WeightServer) -> None:
    answer = get(server, "7.safetensors", Range="bytes=1000000-")
    assert answer.status_code == 206
    assert answer.content == DATA[1_000_000:]


@pytest.mark.parametrize("token", ["x", "wrong", "é"])
def test_without_the_token_nothing_is_told(server: WeightServer, cache: Path, token: str) -> None:
    for name in ("7.safetensors", "9.safetensors"):
        answer = httpx.get(
            f"{server.url}/{name}", headers={b"authorization": f"Bearer {token}".encode("latin-1")}, trust_env=False
        )
        assert answer.status_code == 401
        assert answer.json()["error"]["message"] == "the weight server needs the run's token"
    with pytest.raises(WeightFileError, match="refuses the token"):
        pull.fetch(pull.Source(server.url, "wrong"), described(), cache, deadline_s=20)
    assert not list(cache.glob("*.safetensors"))


@pytest.mark.parametrize(
    "name", [".8.safetensors.tmp", "8.safetensors", "../secret.safetensors", "%2e%2e%2fsecret.safetensors", "", "x"]
)
def test_what_is_no_publication_is_not_served(server: WeightServer, name: str) -> None:
    answer = get(server, name)
    assert answer.status_code == 404
    assert b"secret" not in answer.content.replace(b"secret.safetensors", b"")


def test_a_file_that_is_gone_is_named(server: WeightServer, cache: Path) -> None:
    with pytest.raises(WeightFileError, match=r"/weights/9\.safetensors does not exist on the weight server"):
        pull.fetch(pull.Source(server.url, server.token), described(name="9.safetensors"), cache, deadline_s=20)


@pytest.mark.parametrize("change", ["one bit", "shorter", "longer"])
def test_a_file_that_is_not_what_the_trainer_described_is_refused_by_name(
    server: WeightServer, store: Path, cache: Path, change: str
) -> None:
    broken = {
        "one bit": bytes([DATA[0] ^ 1]) + DATA[1:],
        "shorter": DATA[:-1],
        "longer": DATA + b"x",
    }[change]
    (store / "7.safetensors").write_bytes(broken)
    cause = {"one bit": "is corrupt: BLAKE3", "shorter": "did not come in time", "longer": "has more than"}[change]
    with pytest.raises(WeightFileError, match=rf"weight file http\S+/7\.safetensors {cause}|was answered with 416"):
        pull.fetch(pull.Source(server.url, server.token), described(), cache, deadline_s=1.5)
    assert not list(cache.glob("*safetensors*"))


def test_a_new_file_takes_the_place_of_the_old_one(server: WeightServer, store: Path, cache: Path) -> None:
    source = pull.Source(server.url, server.token)
    pull.fetch(source, described(), cache, deadline_s=20)
    newer = DATA[::-1]
    (store / "8.safetensors").write_bytes(newer)
    pull.fetch(source, described(newer, "8.safetensors"), cache, deadline_s=20)
    assert [path.name for path in cache.glob("*.safetensors")] == ["8.safetensors"]


def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(server: WeightServer, store: Path) -> None:
    """As when the trainer publishes twice more while a slow server still fetches."""
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx.stream("GET", f"{server.url}/7.safetensors", headers=headers, trust_env=False) as answer:
        parts = answer.iter_raw(1000)
        first = next(parts)
        (store / "7.safetensors").unlink()
        assert first + b"".join(parts) == DATA


def test_several_that_want_the_same_file_fetch_it_once(
    server: WeightServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []
    download = pull._download
    monkeypatch.setattr(pull, "_download", lambda *given: (downloads.append(1), download(*given))[1])
    source = pull.Source(server.url, server.token)
    threads = [threading.Thread(target=pull.fetch, args=(source, described(), cache, 20.0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(downloads) == 1
    assert (cache / "7.safetensors").read_bytes() == DATA


def test_a_taken_port_is_named(server: WeightServer, store: Path) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(RoleError, match=rf"the weight server cannot listen on port {port}.*resources\.ports\.weights"):
        WeightServer(store, port=port)


class _Broken(BaseHTTPRequestHandler):
    """Breaks each transfer off after a megabyte; says 503 to every third request."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.headers.get("Range", ""))
        if len(self.asked) % 3 == 2:
            self.send_error(503)
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(DATA) - start))
        self.end_headers()
        self.wfile.write(DATA[start : start + (1 << 20)])

    def log_message(self, *_arguments: object) -> None:
        pass


def test_a_transfer_that_breaks_off_is_taken_up_where_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "_PAUSE_S", 0.01)
    handler = type("Handler", (_Broken,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as broken:
        threading.Thread(target=broken.serve_forever, daemon=True).start()
        source = pull.Source(f"http://127.0.0.1:{broken.server_port}", "t")
        path = pull.fetch(source, described(), cache, deadline_s=20)
        broken.shutdown()
    assert path.read_bytes() == DATA
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in handler.asked if asked]
    assert starts == sorted(starts)
    assert starts[0] > 0
