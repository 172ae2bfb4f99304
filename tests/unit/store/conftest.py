from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from orchestrator.store.engine import connect
from tests.fixtures.clock import Clock


@pytest.fixture
def database(tmp_path: Path) -> Engine:
    return connect(f"sqlite:///{tmp_path / 'state.db'}")


@pytest.fixture
def clock() -> Clock:
    return Clock()
