"""A run folder with simulated services: the orchestrator's runner on it in this process, or in one of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import httpx

import orchestrator.runner.engine
import orchestrator.runner.scorer
import orchestrator.runner.trainer
from orchestrator.runner.engine import Engine
from orchestrator.runner.files import Room
from tests.fakes.engine import FakeEngine
from tests.fakes.run import FakeRun
from tests.sim.clock import Clock
from tests.sim.engine import SimEngine
from tests.sim.inprocess import App, InProcessHttp, InProcessStub
from tests.sim.lengths import Lengths
from tests.sim.model import Speed
from tests.sim.scorers import SimScorers
from tests.sim.trainer import SimTrainer


@dataclass(frozen=True)
class Scale:
    """Sizes and speeds of a simulated fleet.

    Attributes:
        factor: simulated seconds in one real second.
        load_s: seconds for which an engine reads weights at a push.
        score_s: latency of a reward call.
        score_sample_s: work of the rewards on one sample.
        train_token_s: work of the trainer on one token.
        publish_s: seconds in which the trainer hands its weights out.
    """

    engines: int = 4
    factor: float = 1.0
    speed: Speed = field(default_factory=Speed)
    lengths: Lengths = field(default_factory=Lengths)
    load_s: float = 0.14
    score_s: float = 0.0
    score_sample_s: float = 0.0
    train_token_s: float = 0.0
    publish_s: float = 0.05

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Scale:
        """From that text."""
        values = json.loads(text)
        return cls(**values | {"speed": Speed(**values["speed"]), "lengths": Lengths(**values["lengths"])})


class SimRun(FakeRun):
    """A run with its simulated services.

    Args:
        folder: where everything lies.
        scale: sizes and speeds.
        keep: whether requests are written down, as the audits of the tests need them.
    """

    def __init__(self, folder: Path, scale: Scale, *, keep: bool = False, prompts: int = 64, **settings: Any) -> None:
        self.scale = scale
        self.clock = Clock(scale.factor)
        self._keep = keep
        defaults: dict[str, dict[str, Any]] = {
            "algorithm": {"kl_coef": 0.0},
            "rollout": {
                "max_response_length": scale.lengths.largest,
                "max_num_seqs": scale.speed.slots,
                "request_timeout_s": 3600.0,
            },
            "scorers": {"timeout_s": 3600.0},
            "trainer": {"update_timeout_s": 3600.0},
            "pipeline": {"role_timeout_s": 3600.0, "buffer_mib": 65536},
        }
        for section, values in settings.items():
            defaults[section] = defaults.get(section, {}) | values if isinstance(values, dict) else values
        super().__init__(folder, prompts=prompts, servers=scale.engines, **defaults)
        self._widen(folder / "model" / "config.json")

    @property
    def sims(self) -> list[SimEngine]:
        """The engines, as what they are."""
        return cast("list[SimEngine]", self.engines)

    @property
    def sim_trainer(self) -> SimTrainer:
        """The trainer, as what it is."""
        return cast("SimTrainer", self.trainer)

    @contextmanager
    def in_process(self) -> Iterator[None]:
        """The orchestrator in this process reaches the services without sockets and threads: see that module."""
        engine, scorer, trainer = orchestrator.runner.engine, orchestrator.runner.scorer, orchestrator.runner.trainer

        def app(url: str) -> App:
            return next(sim._app for sim in self.sims if sim.address["url"] == url)

        def client(self: Engine) -> httpx.AsyncClient:
            headers = {"Authorization": f"Bearer {self.address.token}"}
            transport = httpx.ASGITransport(app(self.address.url))
            return httpx.AsyncClient(transport=transport, base_url=self.address.url, headers=headers)

        def http(url: str, headers: Mapping[str, str], _room: Room | None = None) -> InProcessHttp:
            return InProcessHttp(app(url), headers)

        with ExitStack() as stack:
            for owner, name, value in (
                (engine, "Http1Client", http),
                (engine.Engine, "_client", client),
                (scorer.scorer_pb2_grpc, "ScorerServiceStub", lambda _channel: InProcessStub(self.scorers)),
                (trainer.trainer_pb2_grpc, "TrainerServiceStub", lambda _channel: InProcessStub(self.trainer)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def _engine(self, store: Path, name: str, *, token_s: float, route: bool) -> FakeEngine:
        return SimEngine(
            store,
            name,
            clock=self.clock,
            speed=self.scale.speed,
            lengths=self.scale.lengths,
            load_s=self.scale.load_s,
            keep=self._keep,
            route=route,
            logs=self.run_dir / "logs" if self._keep else None,
        )

    def _scorers(self) -> SimScorers:
        return SimScorers(self.clock, latency_s=self.scale.score_s, sample_s=self.scale.score_sample_s, keep=self._keep)

    def _trainer(self, store: Path) -> SimTrainer:
        return SimTrainer(store, self.clock, token_s=self.scale.train_token_s, publish_s=self.scale.publish_s)

    def _widen(self, config: Path) -> None:
        """Gives the model of the tests room for these lengths."""
        values = json.loads(config.read_text())
        values["max_position_embeddings"] = 2 * self.scale.lengths.largest
        config.write_text(json.dumps(values))
