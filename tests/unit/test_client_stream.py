"""The client follows a job's events over whatever happens to the stream: busy, away, cut, and refused for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from nightshift.client import Client, ServiceError
from nightshift.client import client as module

END = b'id: 9\nevent: end\ndata: {"id": 9}\n\n'


def step(at: int) -> bytes:
    return b'id: %d\nevent: step\ndata: {"kind": "step", "step": %d}\n\n' % (at, at)


def answers(monkeypatch: pytest.MonkeyPatch, *found: httpx.Response | Exception) -> tuple[Client, list[str]]:
    """A client whose service gives these answers in turn, and the ids behind which it asked."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    left: Iterator[httpx.Response | Exception] = iter(found)
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["last-event-id"])
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Client("http://127.0.0.1:1", "t", transport=httpx.MockTransport(handle)), asked


def stream(*events: bytes) -> httpx.Response:
    return httpx.Response(200, content=b"".join(events))


def refusal(status: int) -> httpx.Response:
    return httpx.Response(status, json={"status": status, "detail": f"refused with {status}"})


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: refusal(503),
        lambda: refusal(429),
        lambda: stream(),
        lambda: stream(b": ping\n\n"),
        lambda: httpx.ConnectError("no route"),
        lambda: httpx.ReadError("reset"),
    ],
)
def test_what_passes_is_waited_for_and_no_event_is_lost(
    monkeypatch: pytest.MonkeyPatch, trouble: Callable[[], httpx.Response | Exception]
) -> None:
    client, asked = answers(monkeypatch, trouble(), stream(step(1)), trouble(), trouble(), stream(step(2), END))
    assert [event.data["step"] for event in client.events("job")] == [1, 2]
    assert asked == ["0", "0", "1", "1", "1"]


def test_a_token_that_is_good_no_more_ends_it_with_the_services_words(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = answers(monkeypatch, stream(step(1)), refusal(401))
    with pytest.raises(ServiceError, match="refused with 401") as caught:
        list(client.events("job"))
    assert caught.value.status == 401


def test_a_service_that_ends_every_stream_at_once_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    client, asked = answers(monkeypatch, *[stream() for _ in range(50)])
    with pytest.raises(ServiceError, match="broke off: it ended without its last event"):
        list(client.events("job"))
    assert 2 < len(asked) < 20
