"""The model of the tests that run on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nightshift.gpu import find_device
from tests.gpu.models import build


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with the tokenizer of NIGHTSHIFT_TEST_TOKENIZER."""
    assert find_device("auto") == "cuda"
    folder = tmp_path_factory.mktemp("model")
    build(folder, "small", Path(os.environ["NIGHTSHIFT_TEST_TOKENIZER"]))
    return folder
