"""What the admission is told of finished steps, how steps are counted, and work that ends together."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runner.admission import Admission
from orchestrator.runner.inputs import steps_sentence
from orchestrator.runner.together import together


@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 8), st.data())
def test_groups_in_flight_never_exceed_the_bound(eta: int, batch: int, steps: int, data: st.DataObject) -> None:
    """Any order of starting, finishing and training: no group starts that could be used too late."""
    admission = Admission(eta, batch, steps)
    running, ready, trained = 0, 0, 0
    for _ in range(data.draw(st.integers(0, 60))):
        room = admission.headroom(ready + trained, running)
        action = data.draw(st.sampled_from(["start", "finish", "train"]))
        if action == "start":
            running += data.draw(st.integers(0, room))
        elif action == "finish" and running:
            running, ready = running - 1, ready + 1
        elif action == "train" and ready >= batch and admission.finished_steps < steps:
            ready, trained = ready - batch, trained + batch
            admission.make_step(batch)
            admission.finish_step()
        assert running + ready <= (eta + 1) * batch
        assert running + ready + trained <= steps * batch


def test_nothing_starts_after_the_last_step() -> None:
    admission = Admission(None, 4, 2, finished_groups=8, finished_steps=2)
    assert admission.headroom(8, 0) == 0


def test_a_cap_bounds_what_runs() -> None:
    assert Admission(None, 4, 100, max_in_flight=6).headroom(0, 4) == 2


@pytest.mark.parametrize(
    ("prompts", "batch", "steps", "sentence"),
    [
        (8, 4, 2, "2 steps of 4 prompts, 2 full ones an epoch"),
        (10, 4, 5, "5 steps of 4 prompts, 2 full ones an epoch and 2 carried over into the next"),
        (
            10,
            4,
            2,
            "2 steps of 4 prompts, 2 full ones an epoch and 2 carried over into the next, 2 left out of the last epoch",
        ),
    ],
)
def test_o37_the_steps_of_an_epoch_are_stated(prompts: int, batch: int, steps: int, sentence: str) -> None:
    assert steps_sentence(prompts, batch, steps) == sentence


async def test_nothing_runs_on_behind_an_error() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ended.append("slow")
            raise

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await together([slow(), failing()])
    assert ended == ["slow"]


async def test_results_keep_their_order() -> None:
    async def value(number: int) -> int:
        await asyncio.sleep(0.001 * (3 - number))
        return number

    assert await together(value(number) for number in range(4)) == [0, 1, 2, 3]
    assert await together([]) == []
