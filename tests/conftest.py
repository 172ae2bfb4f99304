"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from nightshift.data import Tokenizer
from tests.fixtures.rows import ROWS_D, write_parquet
from tests.fixtures.tokenizer_k import write_folder

# A deadline per example would make every property test a timed test.
settings.register_profile("nightshift", deadline=None)
settings.load_profile("nightshift")


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
