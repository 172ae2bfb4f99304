"""Server and trainer at one thing: what each failure of one makes of the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nightshift.wire import codec
from nightshift.wire.errors import RoleError, RoleTimeoutError
from nightshift.wire.v1 import trainer_pb2
from orchestrator.runner import weight_link
from orchestrator.runner.capabilities import Capabilities, check_backend
from orchestrator.runner.weight_link import WeightLink, meet


class Part:
    """What one side does: it ends with an error, with success, or only when it is told to."""

    def __init__(self, ends: Exception | bool | None) -> None:
        self.ends = ends
        self.ended_from_outside = False

    async def run(self) -> None:
        try:
            if self.ends is False:
                await asyncio.Event().wait()
            if isinstance(self.ends, Exception):
                raise self.ends
        except asyncio.CancelledError:
            self.ended_from_outside = True
            raise


ERROR, OTHER = RoleError("no room", role="rollout"), RoleError("NCCL failed", role="trainer")


async def test_both_come_to_their_end() -> None:
    server, trainer = Part(None), Part(None)
    await meet("rollout-0", server.run(), trainer.run())


async def test_a_server_that_fails_ends_the_trainers_part() -> None:
    server, trainer = Part(ERROR), Part(False)
    with pytest.raises(RoleError, match="no room"):
        await meet("rollout-0", server.run(), trainer.run())
    assert trainer.ended_from_outside


async def test_the_error_of_a_server_that_answers_comes_first() -> None:
    with pytest.raises(RoleError, match="no room"):
        await meet("rollout-0", Part(ERROR).run(), Part(OTHER).run())
    with pytest.raises(RoleError, match="NCCL failed"):
        await meet("rollout-0", Part(None).run(), Part(OTHER).run())


async def test_a_server_that_hangs_where_the_trainer_gave_up_is_to_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_link, "_GRACE_S", 0.01)
    server = Part(False)
    with pytest.raises(
        RoleTimeoutError, match="rollout-0 hangs in a transfer that the trainer has given up: NCCL failed"
    ):
        await meet("rollout-0", server.run(), Part(OTHER).run())
    assert server.ended_from_outside


async def test_whoever_does_not_want_it_any_more_ends_both() -> None:
    server, trainer = Part(False), Part(False)
    meeting = asyncio.create_task(meet("rollout-0", server.run(), trainer.run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    meeting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meeting
    assert server.ended_from_outside
    assert trainer.ended_from_outside


@pytest.mark.parametrize(
    ("vllm", "by_store"), [("0.26.0", True), ("0.31.2", True), ("0.32.0", False), ("0.33.0", False)]
)
async def test_each_worker_has_a_place_and_the_rendezvous_is_the_versions(vllm: str, by_store: bool) -> None:
    calls: list[tuple[str, Any]] = []

    async def call(name: str, request: Any, timeout_s: float) -> Any:
        calls.append((name, request))
        return trainer_pb2.OpenLinkResponse(init_info=codec.pack({"world_size": 5}))

    class Server:
        told: dict[str, Any] | None = None

        async def workers(self) -> int:
            return 4

        async def init_transfer(self, info: dict[str, Any]) -> None:
            self.told = info

    server, link = Server(), WeightLink(call)
    await link.join("rollout-0", server, vllm)
    assert [name for name, _ in calls] == ["OpenLink", "JoinLink"]
    assert (calls[0][1].world_size, calls[0][1].by_store) == (5, by_store)
    assert server.told == {"world_size": 5}
    # A larger model gets a longer time, and the server's own call a longer one than the transfer.
    small, large = (link.sending("rollout-0", "run/0/0", size) for size in (10**9, 10**11))
    assert small.seconds < large.seconds < large.patience_s


def test_a_server_that_was_started_for_another_way_is_refused_by_name() -> None:
    check_backend("rollout-0", Capabilities("0.32.0", True, backend="nccl"), "nccl")
    check_backend("rollout-0", Capabilities("0.32.0", True), "nccl")
    with pytest.raises(RoleError, match="rollout-0 takes weights by 'ipc', and they are published for 'nccl'"):
        check_backend("rollout-0", Capabilities("0.32.0", True, backend="ipc"), "nccl")
