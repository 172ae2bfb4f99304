"""A fake trainer that sends its weights to each server over a link, as NCCL does, and a run with it."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import grpc

from nightshift.wire import codec
from nightshift.wire.v1 import trainer_pb2
from tests.fakes.run import FakeRun
from tests.fakes.trainer import FakeTrainer
from tests.fakes.transfers import LINKS, FakeLink


class LinkingTrainer(FakeTrainer):
    """Publishes for NCCL, and sends to each server over a link of its own.

    Attributes:
        opened: server and whether it finds the link by a store, of each link.
        sent: server and version of each transfer that came to its end.
        dropped: servers whose link was given up, each time.
        impatience: server -> longest times of the next calls over its link, in place of those that are asked for.
    """

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        self.backend = "nccl"
        self.opened: list[tuple[str, bool]] = []
        self.sent: list[tuple[str, str]] = []
        self.dropped: list[str] = []
        self.impatience: dict[str, list[float]] = {}
        self._links: dict[str, FakeLink] = {}
        self._copy = self.weights

    async def Publish(self, request: Any, context: Any) -> Any:
        """Keeps a copy, from which is sent whatever the weights become."""
        answer = await super().Publish(request, context)
        self._copy = self.weights.copy()
        return answer

    async def OpenLink(self, request: Any, context: Any) -> Any:
        """Another link with a server."""
        await self._fault("OpenLink", context)
        assert request.world_size == 2
        name = secrets.token_hex(4)
        self._links[request.server] = LINKS[name] = FakeLink()
        self.opened.append((request.server, request.by_store))
        info = (
            {"master_address": "127.0.0.1", "master_port": name} if request.by_store else {"nccl_unique_id_b64": name}
        )
        return trainer_pb2.OpenLinkResponse(init_info=codec.pack({"rank_offset": 1, "world_size": 2, **info}))

    async def JoinLink(self, request: Any, context: Any) -> Any:
        """Meets the server."""
        await self._over("JoinLink", request, context)
        return trainer_pb2.JoinLinkResponse(seconds=0.001)

    async def SendWeights(self, request: Any, context: Any) -> Any:
        """Meets it again, with the weights published last."""
        if request.context.policy_version != self.published[-1]:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "[trainer] others were published")
        if request.server in self._links:
            self._links[request.server].weights = self._copy
        await self._over("SendWeights", request, context)
        self.sent.append((request.server, request.context.policy_version))
        return trainer_pb2.SendWeightsResponse(seconds=0.001)

    async def _over(self, method: str, request: Any, context: Any) -> None:
        link = self._links.get(request.server)
        if link is None:
            await context.abort(grpc.StatusCode.INTERNAL, f"[rollout] no communicator with {request.server} is open")
            return
        times = self.impatience.get(request.server)
        try:
            await self._fault(method, context)
            async with asyncio.timeout(times.pop(0) if times else request.timeout_s):
                await link.meet()
        except TimeoutError:
            self._drop(request.server, link)
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"[rollout] {request.server} did not come in time")
        except BaseException:
            self._drop(request.server, link)
            raise

    def _drop(self, server: str, link: FakeLink) -> None:
        if self._links.get(server) is link:
            del self._links[server]
            self.dropped.append(server)


class LinkedRun(FakeRun):
    """A run whose trainer sends weights by NCCL."""

    trainer: LinkingTrainer

    def _trainer(self, store: Path) -> LinkingTrainer:
        return LinkingTrainer(store)
