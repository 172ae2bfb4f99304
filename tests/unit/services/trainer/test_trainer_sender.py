"""What the coordinator does about transfers: beside its other calls, never while the weights change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nightshift.wire.errors import RoleTimeoutError, VersionConflictError
from services.trainer.coordinator import Coordinator
from services.trainer.sender import WeightSender
from services.trainer.store import Publication
from tests.unit.services.trainer.test_trainer_coordinator import FACTS, FakeRanks


class SendingRanks(FakeRanks):
    """Ranks that publish for NCCL; transfers wait for a signal."""

    world = 1

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []
        self.go = asyncio.Event()
        self.failure: Exception | None = None

    async def beside(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        if method == "open_link":
            return {"world_size": args[1]}
        if method == "drop_link":
            self.failure = RoleTimeoutError("its communicator was closed", role="rollout")
            self.go.set()
            return None
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return None

    def publish(self, rank: int, store: str) -> Publication | None:
        return Publication({"names": []}, "", 7, 1.0, "nccl")


async def test_weights_are_sent_beside_other_calls_and_published_after_that(tmp_path: Path) -> None:
    ranks = SendingRanks()
    coordinator = Coordinator(ranks, FACTS, tmp_path)
    await coordinator.load("", "run/0/0")
    with pytest.raises(VersionConflictError, match=r"those to be sent are ''"):
        await coordinator.sender.send("rollout-0", "run/0/0", 9.0)
    assert (await coordinator.publish("run/0/0", [])).backend == "nccl"
    assert await coordinator.sender.open("rollout-0", 2, True) == {"world_size": 2}
    sending = asyncio.create_task(coordinator.sender.send("rollout-0", "run/0/0", 9.0))
    await coordinator.save(str(tmp_path / "state"), "", "{}")  # not held up by it
    coordinator._published = None
    publishing = asyncio.create_task(coordinator.publish("run/0/0", []))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not publishing.done()
    assert ranks.made("publish") == 1
    with pytest.raises(VersionConflictError):  # none begins while the weights are about to change
        await coordinator.sender.send("rollout-1", "run/0/0", 9.0)
    ranks.go.set()
    assert await sending >= 0.0
    await publishing
    assert ranks.made("publish") == 2
    assert ranks.asked == [("open_link", "rollout-0", 2, True), ("send_weights", "rollout-0", 9.0)]
    await coordinator.sender.send("rollout-1", "run/0/0", 9.0)
    await coordinator.load("", "run/1/0")
    assert coordinator.sender.version == ""


async def test_a_caller_that_goes_away_gives_its_server_up() -> None:
    ranks = SendingRanks()
    sender = WeightSender(ranks)
    joining = asyncio.create_task(sender.join("rollout-0", 9.0))
    await asyncio.sleep(0)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    async with asyncio.timeout(30):
        await sender.settle()  # what ran on the rank has come to its end
    assert ranks.asked == [("join_link", "rollout-0", 9.0), ("drop_link", "rollout-0")]


async def test_a_failed_transfer_says_why() -> None:
    ranks = SendingRanks()
    ranks.failure = RoleTimeoutError("rollout-0 did not take the weights", role="rollout")
    ranks.go.set()
    with pytest.raises(RoleTimeoutError, match="rollout-0 did not take"):
        await WeightSender(ranks).join("rollout-0", 9.0)
