"""Runs that several files of tests look at: a start of all roles takes half a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import Finished, run
from tests.integration.run.shared import deterministic_job


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def deterministic(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A deterministic run that nothing happened to."""
    finished = run(deterministic_job(tmp_path_factory.mktemp("calm"), tiny_model))
    assert finished.code == 0, finished.output
    return finished
