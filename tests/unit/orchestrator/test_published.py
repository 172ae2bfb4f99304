"""Weights that the next publication overwrites where they lie are let go of before it."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.runner.published import Published
from orchestrator.runner.trainer import Publication


def publication(backend: str) -> Publication:
    return Publication("run/0/0", backend, {}, "", 1, [], 1.0, 0.0)


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
async def test_pushes_under_way_are_waited_for_and_no_other_begins(backend: str) -> None:
    published, idle, busy = Published(), asyncio.Lock(), asyncio.Lock()
    await published.release([idle])  # nothing was published yet
    published.add(publication(backend))
    await busy.acquire()
    releasing = asyncio.create_task(published.release([idle, busy]))
    await asyncio.sleep(0)
    assert published.current is None
    assert not releasing.done()
    busy.release()
    await releasing
    assert not idle.locked()
    assert not busy.locked()
    assert published.place("run/0/0") == 0  # what was drawn with them is known all the same


async def test_files_stay_where_they_are_beside_the_next_ones() -> None:
    published, busy = Published(), asyncio.Lock()
    published.add(publication("safetensors"))
    await busy.acquire()
    await published.release([busy])
    assert published.current is not None
