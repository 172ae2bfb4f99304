"""CUDA devices: what the driver says, whether it will do, and which role has which device."""

from __future__ import annotations

import pytest

from nightshift.cli.estimate import ModelShape
from nightshift.cli.gpu_memory import at_once, check_gpu_memory, gpu_memory
from nightshift.config.job import JobSpec
from nightshift.config.resources import ResourcesConfig
from nightshift.gpu import Driver, Gpu, Placement, choose_device, parse_driver, place, visible_names, why_not_cuda
from nightshift.sleep import check_sleep
from nightshift.wire.errors import BadInputError

GIB = 1 << 30
ANSWER = """0, GPU-aa11, NVIDIA H200, 143771, 143000, 580.159.04
1, GPU-bb22, NVIDIA H200, 143771, 12, 580.159.04
"""


def test_the_drivers_answer_is_read() -> None:
    driver = parse_driver(ANSWER)
    assert driver.version == "580.159.04"
    assert [(gpu.index, gpu.uuid, gpu.free) for gpu in driver.gpus] == [
        (0, "GPU-aa11", 143000 << 20),
        (1, "GPU-bb22", 12 << 20),
    ]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("1", ["GPU-bb22"]),
        ("1,0", ["GPU-bb22", "GPU-aa11"]),
        ("GPU-bb", ["GPU-bb22"]),
        ("0,7,1", ["GPU-aa11"]),
        ("", []),
    ],
)
def test_visible_devices_are_counted_as_cuda_counts_them(visible: str, uuids: list[str]) -> None:
    gpus = parse_driver(ANSWER, visible).gpus
    assert [gpu.uuid for gpu in gpus] == uuids
    assert [gpu.index for gpu in gpus] == list(range(len(uuids)))


def test_names_for_a_child_follow_what_this_process_sees() -> None:
    assert visible_names([0, 1], None) == ["0", "1"]
    assert visible_names([1], "GPU-a, GPU-b") == ["GPU-b"]


def driver(version: str = "580.10", gpus: int = 1, memory: int = 140 * GIB) -> Driver:
    return Driver(version, tuple(Gpu(at, f"GPU-{at}", "H200", memory, memory) for at in range(gpus)))


@pytest.mark.parametrize(
    ("wanted", "found", "cuda", "device"),
    [
        ("cpu", driver(), 13, "cpu"),
        ("auto", None, 13, "cpu"),
        ("auto", driver(), 0, "cpu"),
        ("auto", driver(gpus=0), 13, "cpu"),
        ("auto", driver(), 13, "cuda"),
        ("cuda", driver(), None, "cuda"),
    ],
)
def test_a_device_is_chosen(wanted: str, found: Driver | None, cuda: int | None, device: str) -> None:
    assert choose_device(wanted, found, cuda) == device


@pytest.mark.parametrize(
    ("wanted", "found", "cuda", "said"),
    [
        ("cuda", None, 13, "there is no NVIDIA driver"),
        ("cuda", driver(), 0, "built for the CPU"),
        ("cuda", driver(gpus=0), 13, "shows no device"),
        ("auto", Driver("", (), "nvidia-smi does not answer: timeout"), 13, "does not answer"),
        ("auto", driver("575.57"), 13, r"575\.57 is too old .*CUDA 13.*580"),
        ("cuda", driver("470.1"), 12, "525"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    wanted: str, found: Driver | None, cuda: int | None, said: str
) -> None:
    with pytest.raises(BadInputError, match=said) as error:
        choose_device(wanted, found, cuda)
    assert "\n" not in str(error.value)
    assert error.value.fix


def test_a_good_driver_has_nothing_against_it() -> None:
    assert why_not_cuda(driver(), 13) == ("", "")


@pytest.mark.parametrize(
    ("resources", "ranks", "gpus", "placement"),
    [
        ({}, 1, 1, Placement(0, (0,))),
        ({}, 1, 2, Placement(1, (0,))),
        ({}, 2, 4, Placement(2, (0, 1))),
        ({}, 2, 2, Placement(0, (0, 1))),
        ({"rollout_gpu": 0}, 1, 2, Placement(0, (0,))),
        ({"trainer_gpus": [1]}, 1, 2, Placement(0, (1,))),
    ],
)
def test_roles_have_devices_of_their_own_where_there_are_enough(resources, ranks, gpus, placement) -> None:
    found = place(ResourcesConfig(**resources), ranks, gpus)
    assert found == placement
    assert found.shared == (found.rollout in found.trainer)


@pytest.mark.parametrize(
    ("resources", "ranks", "gpus", "said"),
    [
        ({}, 2, 1, r"trainer\.ranks is 2, for which there are 1"),
        ({"trainer_gpus": [0]}, 2, 4, r"trainer\.ranks is 2, for which there are 1"),
        ({"trainer_gpus": [0, 0]}, 2, 4, "one of its own"),
        ({"trainer_gpus": [3]}, 1, 2, r"resources\.trainer_gpus names CUDA device 3"),
        ({"rollout_gpu": 2}, 1, 2, r"resources\.rollout_gpu names CUDA device 2"),
    ],
)
def test_devices_that_are_not_there_are_refused(resources, ranks, gpus, said) -> None:
    with pytest.raises(BadInputError, match=said):
        place(ResourcesConfig(**resources), ranks, gpus)


SHAPE = ModelShape(1_543_714_304, 1536, 28, 151936, 32768, 256, "bfloat16")


def job(**sections) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"train_files": ["a"], "max_prompt_length": 128},
            "rewards": [{"function": "r.py:f"}],
            **sections,
        }
    )


def test_a_job_that_fits_is_taken_and_one_that_does_not_is_told_what_to_lower() -> None:
    rollout = {"dtype": "bfloat16", "kv_cache_gib": 10, "max_response_length": 512}
    trainer = {"dtype": "bfloat16", "max_tokens_per_micro_batch": 20480}
    check_gpu_memory(job(rollout=rollout, trainer=trainer), SHAPE, driver().gpus)
    with pytest.raises(BadInputError, match=r"CUDA device 0 .* needs about .* rollout\.kv_cache_gib"):
        check_gpu_memory(job(rollout=rollout | {"kv_cache_gib": 100}, trainer=trainer), SHAPE, driver().gpus)
    with pytest.raises(BadInputError, match=r"trainer\.max_tokens_per_micro_batch"):
        check_gpu_memory(
            job(rollout=rollout, trainer=trainer | {"max_tokens_per_micro_batch": 60000}), SHAPE, driver().gpus
        )
    with pytest.raises(BadInputError, match="smaller model"):
        check_gpu_memory(job(rollout=rollout, trainer=trainer), SHAPE, driver(memory=16 * GIB).gpus)


def test_what_takes_turns_is_not_counted_at_once() -> None:
    rollout = {"dtype": "bfloat16", "kv_cache_gib": 40, "max_response_length": 512}
    trainer = {"dtype": "bfloat16", "max_tokens_per_micro_batch": 20480}
    parts = gpu_memory(job(rollout=rollout, trainer=trainer), SHAPE, Placement(0, (0,)))[0]
    turns = parts["server's weights"] + parts["KV cache"], parts["activations"] + parts["logits"]
    assert at_once(parts, sleep_mode=False) - at_once(parts, sleep_mode=True) == min(turns)
    memory = at_once(parts, sleep_mode=True) + GIB
    with pytest.raises(BadInputError, match=r"rollout\.sleep_mode true, with pipeline\.max_staleness 0") as error:
        check_gpu_memory(job(rollout=rollout, trainer=trainer), SHAPE, driver(memory=memory).gpus)
    assert "asleep" not in error.value.message
    asleep = job(rollout=rollout | {"sleep_mode": True}, pipeline={"max_staleness": 0}, trainer=trainer)
    check_gpu_memory(asleep, SHAPE, driver(memory=memory).gpus)
    with pytest.raises(BadInputError, match="the server asleep while the trainer works") as error:
        check_gpu_memory(asleep, SHAPE, driver(memory=memory - 2 * GIB).gpus)
    assert "sleep_mode" not in error.value.fix
    apart = gpu_memory(asleep, SHAPE, Placement(1, (0,)))
    assert all(at_once(on, sleep_mode=True) == sum(on.values()) for on in apart.values())


def test_who_sleeps_does_so_for_a_trainer_on_its_device() -> None:
    asleep = job(rollout={"sleep_mode": True}, pipeline={"max_staleness": 0})
    check_sleep(job(), "cpu", None)
    check_sleep(asleep, "cuda", Placement(0, (0,)))
    with pytest.raises(BadInputError, match="vLLM cannot give memory back on a CPU"):
        check_sleep(asleep, "cpu", None)
    with pytest.raises(BadInputError, match="no server shares a CUDA device with the trainer"):
        check_sleep(asleep, "cuda", Placement(1, (0,)))


def test_published_weights_lie_on_the_servers_device() -> None:
    parts = gpu_memory(job(rollout={"dtype": "bfloat16"}), SHAPE, Placement(1, (0,)))
    assert "published weights" in parts[1]
    assert "trainer" not in parts[1]
    assert "server" not in parts[0]


def test_published_weights_lie_once_on_each_device_that_has_servers() -> None:
    weights = SHAPE.parameters * 2
    spread = gpu_memory(job(rollout={"dtype": "bfloat16", "servers": 5}), SHAPE, Placement(1, (0,), (2,)))
    assert {gpu: parts.get("published weights", 0) > weights for gpu, parts in spread.items()} == {
        0: False,
        1: True,
        2: True,
    }
    assert spread[1]["server's weights"] == 3 * weights
    sent = gpu_memory(job(rollout={"dtype": "bfloat16", "weight_transfer": "nccl"}), SHAPE, Placement(1, (0,)))
    assert sent[0]["published weights"] == weights
    assert "published weights" not in sent[1]
    # Where the trainer is, it has its context anyway.
    shared = gpu_memory(job(rollout={"dtype": "bfloat16", "servers": 2}), SHAPE, Placement(0, (0,)))
    assert shared[0]["published weights"] == weights
