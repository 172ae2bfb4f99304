"""Device, cores and room for the weights."""

import json
import shutil
from types import SimpleNamespace

import pytest

from nightshift.config.job import JobSpec
from nightshift.config.resources import ResourcesConfig
from nightshift.wire.errors import BadInputError
from services.agent.machine import allot_cores, check_store_room, split_cores


@pytest.mark.parametrize(
    ("available", "rollout", "trainer", "expected"),
    [
        ([0, 1], None, None, ((0,), (1,))),
        ([5, 3, 9], None, None, ((3,), (5,))),
        ([4], None, None, ((4,), (4,))),
        ([0, 1, 2, 3], [2, 3], None, ((2, 3), (1,))),
        ([0, 1, 2, 3], None, [1, 2, 3], ((0,), (1, 2, 3))),
        ([0, 1], [], [], ((), ())),
    ],
)
def test_generation_and_training_get_cores_of_their_own(available, rollout, trainer, expected):
    resources = ResourcesConfig(rollout_cores=rollout, trainer_cores=trainer)
    cores = allot_cores(resources, "cpu", available)
    assert (cores.rollout, cores.trainer) == expected


def test_a_core_that_is_not_there_is_named():
    with pytest.raises(BadInputError, match=r"resources\.trainer_cores names core 7.*\[0, 1\]"):
        allot_cores(ResourcesConfig(trainer_cores=[1, 7]), "cpu", [1, 0])


def test_on_cuda_nothing_is_pinned_unless_asked_for():
    assert allot_cores(ResourcesConfig(), "cuda", [0, 1]).rollout == ()
    assert allot_cores(ResourcesConfig(trainer_cores=[1]), "cuda", [0, 1]).trainer == (1,)


def test_a_store_without_room_is_refused_with_the_sizes(tmp_path, monkeypatch):
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1 << 20], "data_offsets": [0, 2 << 20]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2 << 20))
    spec = JobSpec.model_validate(
        {
            "name": "t",
            "model": {"path": str(tmp_path)},
            "data": {"train_files": ["a"]},
            "rewards": [{"function": "r.py:f"}],
        }
    )
    free = {"value": 12 << 20}  # three files of a million parameters in float32
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free["value"]))
    check_store_room(spec, tmp_path)
    free["value"] -= 1
    with pytest.raises(BadInputError, match=r"has 11 MiB free.*need 12 MiB.*resources\.weight_store"):
        check_store_room(spec, tmp_path)


@pytest.mark.parametrize(
    ("available", "servers", "rollout", "trainer"),
    [([0, 1], 2, (0,), (1,)), ([0, 1, 2], 2, (0, 1), (2,)), ([0, 1, 2, 3], 2, (0, 1), (2,)), ([0], 3, (0,), (0,))],
)
def test_servers_get_cores_of_their_own_as_long_as_the_trainer_has_one(available, servers, rollout, trainer):
    cores = allot_cores(ResourcesConfig(), "cpu", available, servers)
    assert (cores.rollout, cores.trainer) == (rollout, trainer)


@pytest.mark.parametrize(
    ("cores", "servers", "shares"),
    [
        ((0, 1, 2, 3, 4), 2, [(0, 1), (2, 3, 4)]),
        ((4,), 3, [(4,), (4,), (4,)]),
        ((4, 6), 3, [(4,), (6,), (4,)]),
        ((), 2, [(), ()]),
        ((1, 2), 1, [(1, 2)]),
    ],
)
def test_cores_are_split_among_the_servers(cores, servers, shares):
    assert split_cores(cores, servers) == shares
