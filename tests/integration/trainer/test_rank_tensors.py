"""What a rank says of its tensors for debugging: of the first micro-batch of the last part, on the real device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nightshift.wire.experience import LossSpec
from services.trainer.config import RankConfig
from services.trainer.rank import TrainerRank
from tests.fixtures.samples import make_sample
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a rank leaves in the environment must not reach processes that other tests start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_shapes_dtypes_and_devices_of_the_first_micro_batch(tmp_path: Path) -> None:
    rank = TrainerRank(RankConfig(model_path=str(build_tiny_model(tmp_path / "model")), micro_batch_size=2))
    assert rank.tensors() == []
    samples = [make_sample(f"g.{at}", tokens=2 + at, advantages=np.ones(2 + at, np.float32)) for at in range(4)]
    assert rank.update(samples, LossSpec(), 1e-4)["stepped"] == 1
    found = {item["name"]: item for item in rank.tensors()}
    assert {item["device"] for item in found.values()} == {"cpu"}
    assert {item["role"] for item in found.values()} == {"trainer"}
    assert found["logprobs"]["dtype"] == found["advantages"]["dtype"] == found["parameters"]["dtype"] == "float32"
    assert found["mask"]["dtype"] == "bool"
    assert found["loss"]["shape"] == []
    (tokens,) = found["logprobs"]["shape"]
    assert found["old_logprobs"]["shape"] == found["advantages"]["shape"] == found["mask"]["shape"] == [tokens]
    assert 4 <= tokens < sum(len(sample.response_ids) for sample in samples), "one micro-batch of two"
