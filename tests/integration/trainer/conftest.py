from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """What a rank leaves in the environment must not reach processes that other tests start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
