"""The simulated trainer: a time for each token, and a look at the version of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from nightshift.wire import codec
from nightshift.wire.experience import LossSpec, Sample, VersionSpan
from nightshift.wire.v1 import trainer_pb2
from nightshift.wire.version import PolicyVersion
from tests.fakes.trainer import FakeTrainer
from tests.sim.clock import Clock


class SimTrainer(FakeTrainer):
    """Computes nothing. Counts what it is given: tokens by age, samples, and those that came twice.

    Args:
        token_s: seconds of work on one token, prompt and response alike.
        step_s: seconds of work on one optimiser step beside its tokens.
        publish_s: seconds until the weights are handed out.

    Attributes:
        ages: trained tokens by the number of updates between their weights and those that the update starts from.
        applied: simulated time of the end of each update.
        busy_s: simulated seconds of work.
        twice: samples that came more than once.
    """

    def __init__(
        self, store: Path, clock: Clock, *, token_s: float = 0.0, step_s: float = 0.0, publish_s: float = 0.0
    ) -> None:
        super().__init__(store)
        self.clock = clock
        self.token_s = token_s
        self.step_s = step_s
        self.publish_s = publish_s
        self.ages: Counter[int] = Counter()
        self.applied: list[float] = []
        self.tokens: list[int] = []
        self.samples = 0
        self.twice = 0
        self.busy_s = 0.0
        self._seen: set[str] = set()

    def _read(self, data: bytes) -> list[Sample]:
        """The samples of a request, unchecked: what is measured shares two cores with this."""
        return [
            Sample(**{**item, "versions": [VersionSpan(*span) for span in item["versions"]]})
            for item in codec.unpack(data)
        ]

    async def _work(self, samples: list[Sample], final: bool) -> None:
        tokens = sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples)
        seconds = final * self.step_s + tokens * self.token_s
        self.busy_s += seconds
        await self.clock.sleep(seconds)

    async def Publish(self, request: Any, context: Any) -> Any:
        """Hands the weights out."""
        await self.clock.sleep(self.publish_s)
        return await super().Publish(request, context)

    def _apply(self, request: Any, samples: list[Sample], loss: LossSpec) -> Any:
        tokens = 0
        for sample in samples:
            tokens += len(sample.response_ids)
            self.twice += sample.sample_id in self._seen
            self._seen.add(sample.sample_id)
            for span in sample.versions:
                age = request.step - 1 - PolicyVersion.parse(span.version).step
                self.ages[age] += span.end - span.start
        self.samples += len(samples)
        self.tokens.append(tokens)
        self.applied.append(self.clock.now())
        self.optimizer_steps += 1
        self.version = request.new_version
        metrics = {"tokens": float(tokens), "sequences": float(len(samples)), "loss/actor": 0.0}
        return trainer_pb2.UpdateResponse(applied=True, stepped=True, metrics=metrics, seconds=0.001)
