"""Trainer and scorers that work for another host answer only who has the run's token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from nightshift.wire import codec, listen
from nightshift.wire.errors import RoleError
from nightshift.wire.v1 import scorer_pb2, trainer_pb2, trainer_pb2_grpc
from orchestrator.runner.trainer import TrainerClient
from services.scorers.replicas import Replica
from services.trainer.servicer import TokenCheck


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Describes itself, and knows nothing else."""

    async def Describe(self, request: Any, context: Any) -> Any:
        return trainer_pb2.DescribeTrainerResponse(model="m")


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setenv(listen.TOKEN_VARIABLE, "of-the-run")
    server = grpc.aio.server(interceptors=[TokenCheck()])
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"grpc://127.0.0.1:{port}"
    await server.stop(None)


def client(url: str, token: str) -> TrainerClient:
    return TrainerClient(
        url, run_id="r", job_trace_id="", update_timeout_s=30, away_s=30, replaced=lambda: False, token=token
    )


async def test_a_trainer_answers_the_holder_of_the_token(url: str) -> None:
    own = client(url, "of-the-run")
    assert (await own.describe()).model == "m"
    await own.close()


@pytest.mark.parametrize("token", ["", "of-another-run"])
async def test_a_trainer_refuses_all_others_at_once(url: str, token: str) -> None:
    other = client(url, token)
    with pytest.raises(RoleError, match=r"UNAUTHENTICATED.*lacks the run's token"):
        await other.describe()
    with pytest.raises(RoleError, match="UNAUTHENTICATED"):
        await other.load("", "r/0/0")
    await other.close()


class Scorer(Replica):
    """Gives 1 for each sample."""

    async def _score(self, samples: list[Any], weights: Any) -> list[dict[str, Any]]:
        return [{"id": sample["id"], "reward": 1.0} for sample in samples]

    def _describe(self) -> dict[str, Any]:
        return {}


class Context:
    """What Serve hands a replica of a call."""

    def __init__(self, token: str) -> None:
        self.pairs = [("application", "reward"), *listen.metadata(token)]
        self.code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.pairs

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, text: str) -> None:
        assert "lacks the run's token" in text


@pytest.mark.parametrize(
    ("needed", "given", "refused"),
    [("of-the-run", "of-the-run", False), ("of-the-run", "", True), ("of-the-run", "other", True), ("", "", False)],
)
async def test_a_scorer_does_likewise(monkeypatch: pytest.MonkeyPatch, needed: str, given: str, refused: bool) -> None:
    monkeypatch.setenv(listen.TOKEN_VARIABLE, needed)
    scorer = Scorer("reward", "reward.score", None, "r")
    request = scorer_pb2.ScoreRequest(samples=codec.pack([{"id": "a"}]))
    context = Context(given)
    answer = await scorer.Score(request, context)
    assert (context.code is grpc.StatusCode.UNAUTHENTICATED) is refused
    assert bool(answer.results) is not refused
    described = await scorer.Describe(scorer_pb2.DescribeRequest(), Context(given))
    assert bool(described.role) is not refused
