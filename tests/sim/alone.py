"""Each stage of a simulated step by itself: what the model of the speed-up is fed with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.sim.lengths import Lengths
from tests.sim.model import EngineModel, Speed, Stream


@dataclass(frozen=True, slots=True)
class Generation:
    """Generation of one batch with nothing else on the engines.

    Attributes:
        seconds: from the first request to the last answer.
        occupancy: area under the number of running responses / (its peak x seconds).
        tokens: of all responses.
    """

    seconds: float
    occupancy: float
    tokens: int


def generate(names: Sequence[str], context: int, engines: int, speed: Speed, lengths: Lengths) -> Generation:
    """Draws these samples at once, as evenly over the engines as least-loaded routing spreads them."""
    ended: list[float] = []
    moments: list[tuple[float, int]] = []
    occupied, tokens = 0.0, 0
    for engine in range(engines):
        model = EngineModel(speed, lambda stream, count: None)
        for name in names[engine::engines]:
            model.add(Stream(name, context, length := lengths.of(name), mark=length), 0.0)
        moments.append((0.0, len(model.running)))
        running, now = len(model.running), 0.0
        while (due := model.next_event()) is not None:
            now = max(now, due) + 1e-9
            model.advance(now)
            moments.append((now, len(model.running) - running))
            running = len(model.running)
        ended.append(now)
        occupied += model.occupied_s
        tokens += model.tokens
    peak = level = 0
    for _, change in sorted(moments, key=lambda item: item[0]):
        level += change
        peak = max(peak, level)
    return Generation(max(ended), occupied / (peak * max(ended)), tokens)
