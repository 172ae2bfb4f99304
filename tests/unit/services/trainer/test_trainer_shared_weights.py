"""Where published weights lie on GPUs: which devices a rank sees, and one copy for each device with servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nightshift.config import JobSpec
from nightshift.gpu import Placement
from services.trainer.config import RankConfig
from services.trainer.rank_actor import environment
from services.trainer.shared_weights import SharedWeights


def config(placement: Placement, **rollout: Any) -> RankConfig:
    spec = JobSpec.model_validate(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"train_files": ["a"]},
            "rewards": [{"function": "r.py:f"}],
            "rollout": rollout,
            "trainer": {"ranks": len(placement.trainer)},
        }
    )
    return RankConfig.from_spec(spec, "cuda", placement)


def test_rank_0_sees_each_device_with_servers_and_the_others_see_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spread = config(Placement(2, (0, 1), (3, 4)), servers=5)
    assert spread.weight_backend == "ipc"
    assert environment(spread, 0, 2)["CUDA_VISIBLE_DEVICES"] == "0,2,3,4"
    assert environment(spread, 1, 2)["CUDA_VISIBLE_DEVICES"] == "1"
    assert spread.publishes_to() == [1, 2, 3]


def test_servers_on_the_trainers_device_take_the_weights_there() -> None:
    assert config(Placement(0, (0,)), servers=2).publishes_to() == [0]
    assert config(Placement(0, (1,)), servers=2).publishes_to() == [1]
    assert RankConfig("m", device="cuda", weight_backend="ipc").publishes_to() == [0]


def test_every_copy_holds_what_was_published_last() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    policy: Any = SimpleNamespace(model=model)
    shared = SharedWeights(policy, torch.bfloat16, [torch.device("cpu"), torch.device("cpu")], partitioned=False)
    assert shared.fill() == 1.0
    assert shared.fill() == 0.0
    with torch.no_grad():
        model[0].weight += 1.0
    assert shared.fill() == pytest.approx(15 / 32)
    first, second = shared._flats
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)
    assert torch.equal(shared._views["0.weight"], model[0].weight.to(torch.bfloat16))
