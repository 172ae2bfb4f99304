"""Calls to scorers: which prompt groups travel together."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

from orchestrator.runner import scorer
from tests.fakes.scorers import FakeScorers
from tests.sim.clock import Clock, run_virtual
from tests.sim.inprocess import InProcessStub
from tests.sim.scorers import SimScorers


def calls(latency_s: float, apart_s: float, wait_s: float) -> list[int]:
    """Samples in each call, where one group comes first and, once it is scored, four others so many seconds apart."""

    async def go() -> FakeScorers:
        scorers = SimScorers(Clock(), latency_s=latency_s, keep=True)
        stub = InProcessStub(scorers)
        with mock.patch.object(scorer.scorer_pb2_grpc, "ScorerServiceStub", return_value=stub):
            client = scorer.ScorerClient(
                "reward",
                "grpc://127.0.0.1:1",
                "reward",
                run_id="run",
                job_trace_id="",
                timeout_s=3600.0,
                away_s=1.0,
                batch_samples=32,
                batch_wait_s=wait_s,
            )
        try:
            await client.score([{"id": "g0.0", "response_ids": []}])
            asked = []
            for index in range(1, 5):
                samples = [{"id": f"g{index}.{slot}", "response_ids": []} for slot in range(2)]
                asked.append(asyncio.ensure_future(client.score(samples)))
                await asyncio.sleep(apart_s)
            for scored in await asyncio.gather(*asked):
                assert len(scored.results) == 2
        finally:
            await client.close()
        return scorers

    return [len(call.samples) for call in run_virtual(go()).calls]


@pytest.mark.parametrize(
    ("latency_s", "wait_s", "expected"),
    [
        (0.01, 0.02, [1, 2, 2, 2, 2]),  # quick: none is held back for others
        (2.0, 0.02, [1, 6, 2]),  # a twentieth of it is 100 ms
        (60.0, 0.02, [1, 8]),  # no longer than 250 ms
        (60.0, 0.0, [1, 2, 2, 2, 2]),  # none is to wait
    ],
)
def test_groups_wait_for_others_as_long_as_the_scorer_is_slow(
    latency_s: float, wait_s: float, expected: list[int]
) -> None:
    assert calls(latency_s, 0.045, wait_s) == expected
