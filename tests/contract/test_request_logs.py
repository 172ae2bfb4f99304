"""The request logs of servers on other hosts, copied into the run's folder while they go on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from nightshift.wire.events import EventLog, read_events
from nightshift.wire.lease_file import LeasedServer
from nightshift.wire.request_log import hash_ids, read_logs
from services.agent.request_logs import RequestLogs
from services.rollout.guard import TOKEN_VARIABLE, Guard
from services.rollout.request_log import RequestLogger
from services.rollout.route import Route
from tests.unit.services.rollout.fake_vllm import FakeEngineClient, Inner

TOKEN = "of-the-server"


class Server:
    """Route and guard over loopback, with a log that may be begun anew."""

    def __init__(self, path: Path) -> None:
        self.route = Route(Inner())
        self.route._engine = FakeEngineClient()  # type: ignore[assignment]
        self.path = path
        self.begin()

    def begin(self, path: Path | None = None) -> None:
        """Another start of the server, which writes to another file where one is given."""
        self.path = path or self.path
        self.route._log = RequestLogger(self.path, "night-0", "start", time.time)

    def serve(self, request: str) -> None:
        """A response of two tokens is written down."""
        log = self.route._log.response(request, [1, 2])
        log._note(0, [7, 8], [], "stop")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, str]]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    made = Server(tmp_path / "there" / "requests.jsonl")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(Guard(made.route), log_level="warning", ws="none", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield made, f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = running.force_exit = True
    thread.join(30)


def copies(url: str, folder: Path, token: str = TOKEN) -> RequestLogs:
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    entry = {"name": "rollout-0", "url": url, "token": token}
    return RequestLogs([entry], logs, EventLog(folder / "events.jsonl", "run"))


def requests(folder: Path) -> list[str]:
    return [line.request for line in read_logs(folder / "logs").served]


def test_what_is_served_from_here_on_is_copied_and_nothing_twice(server: tuple[Server, str], tmp_path: Path) -> None:
    made, url = server
    made.serve("other.g0000000.0.0")  # of another run, before this one
    copied = copies(url, tmp_path)
    copied.copy()
    assert requests(tmp_path) == []
    made.serve("run.g0000000.0.0")
    copied.copy()
    copied.copy()
    made.serve("run.g0000000.1.0")
    again = copies(url, tmp_path)  # the run is resumed: it goes on where it was
    again.copy()
    assert requests(tmp_path) == ["run.g0000000.0.0", "run.g0000000.1.0"]
    assert read_logs(tmp_path / "logs").served[0].prompt == hash_ids([1, 2])
    assert read_logs(tmp_path / "logs").unreadable == []


def test_a_log_that_was_begun_anew_is_copied_from_its_beginning(server: tuple[Server, str], tmp_path: Path) -> None:
    made, url = server
    copied = copies(url, tmp_path)
    copied.copy()
    made.serve("run.g0000000.0.0")
    copied.copy()
    made.begin(tmp_path / "there" / "another.jsonl")
    made.serve("run.g0000001.0.0")
    copied.copy()
    made.begin()  # a restart that goes on in the same file
    made.serve("run.g0000002.0.0")
    copied.copy()
    assert requests(tmp_path) == ["run.g0000000.0.0", "run.g0000001.0.0", "run.g0000002.0.0"]


def test_a_large_log_comes_in_pieces_of_whole_lines(
    server: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, url = server
    monkeypatch.setattr("services.rollout.request_log._PIECE", 700)
    copied = copies(url, tmp_path)
    copied.copy()
    for at in range(20):
        made.serve(f"run.g{at:07}.0.0")
    copied.copy()
    assert len(requests(tmp_path)) == 20


def test_a_server_that_keeps_no_log_is_named_once(server: tuple[Server, str], tmp_path: Path) -> None:
    made, url = server
    made.route._log = RequestLogger(None)
    copied = copies(url, tmp_path)
    copied.copy()
    copied.copy()
    (warning,) = read_events(tmp_path / "events.jsonl")
    assert "rollout-0" in warning["message"]
    assert "cannot prove" in warning["message"]


def test_the_log_of_a_server_that_is_lent_is_copied_while_the_run_has_it(
    server: tuple[Server, str], tmp_path: Path
) -> None:
    """What was served between the lease and the first look at it counts; what comes after its end does not."""
    made, url = server
    (tmp_path / "logs").mkdir()
    lent: list[LeasedServer] = []
    copied = RequestLogs([], tmp_path / "logs", EventLog(tmp_path / "events.jsonl", "run"), lambda: lent)
    copied.copy()
    made.serve("other.g0000000.0.0")
    made.serve("run.g0000000.0.0")
    lent.append(LeasedServer("s0", url, 1, TOKEN))
    copied.copy()
    made.serve("run.g0000000.1.0")
    lent.clear()
    copied.copy()
    made.serve("other.g0000000.1.0")
    copied.copy()
    mine = [request for request in requests(tmp_path) if request.startswith("run.")]
    assert mine == ["run.g0000000.0.0", "run.g0000000.1.0"]
    assert "other.g0000000.1.0" not in requests(tmp_path)
    lent.append(LeasedServer("s0", url, 3, TOKEN))
    made.serve("run.g0000001.0.0")
    copied.copy()
    assert [request for request in requests(tmp_path) if request.startswith("run.")] == [*mine, "run.g0000001.0.0"]
    assert read_logs(tmp_path / "logs").unreadable == []


def test_of_a_long_log_only_whole_lines_are_taken(
    server: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, url = server
    for at in range(20):
        made.serve(f"run.g{at:07}.0.0")
    monkeypatch.setattr("services.agent.request_logs._BACK", 1000)
    (tmp_path / "logs").mkdir()
    lent = [LeasedServer("s0", url, 1, TOKEN)]
    RequestLogs([], tmp_path / "logs", EventLog(tmp_path / "events.jsonl", "run"), lambda: lent).copy()
    assert 1 <= len(requests(tmp_path)) < 20
    assert requests(tmp_path)[-1] == "run.g0000019.0.0"
    assert read_logs(tmp_path / "logs").unreadable == []


def test_without_its_token_a_server_tells_nothing(server: tuple[Server, str], tmp_path: Path) -> None:
    made, url = server
    copied = copies(url, tmp_path, token="other")
    copied.copy()
    made.serve("run.g0000000.0.0")
    copied.copy()
    assert requests(tmp_path) == []
