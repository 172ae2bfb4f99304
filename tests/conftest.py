"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from nightshift.data import Tokenizer
from tests.fixtures.rows import ROWS_D, write_parquet
from tests.fixtures.tokenizer_k import write_folder

# A deadline per example, or for the making of examples, would make every property test a timed test.
settings.register_profile("nightshift", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI checks a change, so its examples are the same each time; new ones are looked for where a person can act on them.
settings.register_profile("ci", settings.get_profile("nightshift"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "nightshift")


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder with tokenizer K and the configuration of model T."""
    return write_folder(tmp_path / "tokenizer")


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    """Tokenizer K with its chat template."""
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """Data D as a parquet file."""
    return write_parquet(tmp_path / "rows.parquet", ROWS_D)
