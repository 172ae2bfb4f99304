"""One run in a storm: its services are fakes that are killed and started again at random, its runner a real process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.chaos.runners import Runner, Runners
from tests.fakes.audit import audit
from tests.fakes.run import FakeRun

#: Steps of a run, and prompts (an epoch ends within it).
STEPS, PROMPTS = 12, 17
VICTIMS = ("engine", "scorers", "trainer", "orchestrator")
#: The runner is killed more often: it holds most of what could be lost.
_WEIGHTS = (2, 1, 2, 4)
_LIMIT_S = 300.0


@dataclass
class Weather:
    """What happened to one run."""

    seed: int
    settings: dict[str, Any]
    kills: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds from a kill to the next update
    seconds: float = 0.0
    lineages: int = 0
    requests: int = 0
    weights: np.ndarray | None = None  # at the end

    @property
    def deterministic(self) -> bool:
        """Whether timing must not show in the weights."""
        return bool(self.settings["pipeline"]["deterministic"])

    def line(self) -> str:
        """As a line of text."""
        kills = ", ".join(f"{victim} {count}" for victim, count in sorted(self.kills.items()))
        return f"seed {self.seed}: {kills or 'no kill'}; {self.lineages} lineages, {self.seconds:.1f} s"


def settings_of(dice: Random) -> dict[str, Any]:
    """A job, at random."""
    staleness = dice.choice([0, 0, 1, 1, 2, None])
    return {
        "servers": dice.choice([1, 1, 2]),
        "token_s": dice.choice([0.001, 0.003, 0.008]),
        "pipeline": {
            "max_staleness": staleness,
            "max_groups_in_flight": 6,
            "on_stale": dice.choice(["wait", "wait", "drop"]),
            "streaming": dice.random() < 0.7,
            "weight_update": dice.choice(["in_flight", "in_flight", "drain"]),
            "deterministic": staleness == 0 and dice.random() < 0.6,
            "role_timeout_s": 30.0,
            "retries": 8,
        },
        "rollout": {"flush_tokens": dice.choice([0, 1, 3]), "request_timeout_s": 60.0},
        "scorers": {"timeout_s": 60.0},
        "trainer": {
            "save_freq": dice.choice([1, 2, 3, 5]),
            "total_steps": STEPS,
            "seed": dice.randrange(1000),
            "update_timeout_s": 60.0,
        },
        "checkpoint": {"keep": dice.choice([1, 2, None])},
    }


class Storm:
    """Runs a job to its end, with ``moments`` kills on its way (fewer where it ends before them)."""

    def __init__(self, folder: Path, seed: int, runners: Runners, moments: int) -> None:
        self._dice = Random(seed)
        self.weather = Weather(seed, settings_of(self._dice))
        self._run = FakeRun(folder, prompts=PROMPTS, **self.weather.settings)
        self._runners = runners
        self._moments = moments
        self._runner: Runner | None = None
        self._trainer_died_at = -1

    async def blow(self) -> Weather:
        """Runs the job and audits it.

        Raises:
            AssertionError: the job did not end, or its books do not balance; the message has the seed.
        """
        run, weather, began = self._run, self.weather, time.monotonic()
        async with run:
            self._slow_down()
            try:
                async with asyncio.timeout(_LIMIT_S):
                    code = await self._drive()
                assert code == 0, run.error()
                self._check()
            except (AssertionError, TimeoutError) as error:
                log = (run.run_dir / "runner.log").read_text()[-1500:]
                raise AssertionError(
                    f"{weather.line()}\n{weather.settings}\n{type(error).__name__}: {error}\n{run.error()}\n"
                    f"{run.warnings()[-5:]}\n{log}"
                ) from error
        weather.seconds = time.monotonic() - began
        return weather

    def _slow_down(self) -> None:
        """Work of the trainer takes a while, so that moments fall into it too."""
        for method in ("Update", "Save", "Publish"):
            if self._dice.random() < 0.7:
                self._run.trainer.faults.plan("slow", method, times=None, delay=self._dice.choice([0.01, 0.05, 0.15]))

    async def _drive(self) -> int:
        killing = asyncio.create_task(self._kill_at_random())
        resume = False
        try:
            while True:
                self._runner = await self._runners.start(self._run.run_dir, resume=resume)
                code = await asyncio.shield(self._runner.ended)
                if killing.done():
                    killing.result()
                if code != -9:
                    return code
                resume = True
        finally:
            self._runner and self._runner.kill()
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)

    async def _kill_at_random(self) -> None:
        actions: dict[str, Callable[[], Awaitable[bool]]] = {
            "engine": self._kill_engine,
            "scorers": self._kill_scorers,
            "trainer": self._kill_trainer,
            "orchestrator": self._kill_orchestrator,
        }
        dice = self._dice
        victims = dice.sample(VICTIMS, len(VICTIMS))  # each of them once, then as it comes
        victims += dice.choices(VICTIMS, _WEIGHTS, k=self._moments)
        for victim in victims[: self._moments]:
            await asyncio.sleep(dice.expovariate(1 / 0.25))
            before, began = len(self._run.updates), time.monotonic()
            if await actions[victim]():
                self.weather.kills[victim] += 1
                patience = dice.choice([0.3, _LIMIT_S, _LIMIT_S])  # a third may fall into the recovery
                if await self._next_update(before, began + patience):
                    self.weather.recoveries.append(time.monotonic() - began)

    async def _next_update(self, before: int, deadline: float) -> bool:
        while len(self._run.updates) == before and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return len(self._run.updates) > before

    async def _kill_engine(self) -> bool:
        await self._run.restart(self._dice.choice(self._run.engines), self._dice.uniform(0, 0.3))
        return True

    async def _kill_scorers(self) -> bool:
        await self._run.scorers.stop()
        await asyncio.sleep(self._dice.uniform(0, 0.3))
        await self._run.scorers.start()
        return True

    async def _kill_trainer(self) -> bool:
        furthest = max((update.step for update in self._run.updates), default=0)
        if furthest <= self._trainer_died_at:
            return False  # a step that kills each trainer ends the run, by rule: this one must get further first
        self._trainer_died_at = furthest
        if self._run.trainer.gave_up is not None:
            return False  # it is being replaced
        await self._run.replace_trainer(self._dice.uniform(0, 0.3))
        return True

    async def _kill_orchestrator(self) -> bool:
        return self._runner is not None and self._runner.kill()

    def _check(self) -> None:
        pipeline = self.weather.settings["pipeline"]
        found = audit(self._run, steps=STEPS, staleness=pipeline["max_staleness"])
        assert found.accounts["trained"] == STEPS * self._run.spec.rollout.batch_size
        self.weather.lineages = found.lineage + 1
        self.weather.requests = found.requests
        self.weather.weights = self._run.trainer.weights


async def blow_all(folder: Path, seeds: Iterable[int], moments: int, at_once: int = 5) -> list[Weather]:
    """Storms one beside the other, as many at once as given; prints a line for each.

    Raises:
        AssertionError: a run did not end, its books do not balance, or the weights of a deterministic one are not those
            that it has without a kill.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(runners: Runners, seed: int) -> Weather:
        async with gate:
            (folder / str(seed)).mkdir()
            try:
                weather = await Storm(folder / str(seed), seed, runners, moments).blow()
            except AssertionError as error:
                print(error, flush=True)  # at once: the others of this batch still run
                raise
            if weather.deterministic:
                calm = await calm_weights(folder / str(seed) / "calm", seed)
                np.testing.assert_array_equal(weather.weights, calm, f"seed {seed}: other weights than without a kill")
        print(weather.line(), flush=True)
        return weather

    async with Runners() as runners:
        return list(await asyncio.gather(*(one(runners, seed) for seed in seeds)))


async def calm_weights(folder: Path, seed: int) -> np.ndarray:
    """Final weights of the same job without a kill."""
    run = FakeRun(folder, prompts=PROMPTS, **settings_of(Random(seed)))
    async with run:
        assert await run.run() == 0, run.error()
        return run.trainer.weights
