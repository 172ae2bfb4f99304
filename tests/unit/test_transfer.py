"""How the weights of a job travel."""

from __future__ import annotations

from typing import Any

import pytest

from nightshift.config import JobSpec
from nightshift.gpu import Placement
from nightshift.transfer import check_nccl, weight_backend, weight_transfer
from nightshift.wire.errors import BadInputError


def spec(**rollout: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"train_files": ["a"]},
            "rewards": [{"function": "r.py:f"}],
            "rollout": rollout,
        }
    )


@pytest.mark.parametrize(
    ("rollout", "device", "expected"),
    [
        ({}, "cpu", "shared_memory"),
        ({}, "cuda", "ipc"),
        ({"servers": 8}, "cuda", "ipc"),
        ({"servers": 2}, "cpu", "shared_memory"),
        ({"servers": 2, "weight_transfer": "shared_memory"}, "cuda", "shared_memory"),
        ({"url": "http://127.0.0.1:8000"}, "cuda", "shared_memory"),
        ({"url": "http://gpu-7:8000"}, "cpu", "http"),
        ({"url": "http://gpu-7:8000", "weight_transfer": "shared_memory"}, "cpu", "shared_memory"),
        ({"url": ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]}, "cpu", "shared_memory"),
        ({"url": ["http://127.0.0.1:8000", "http://gpu-7:8000"]}, "cpu", "http"),
        ({"weight_transfer": "http"}, "cuda", "http"),
        ({"weight_transfer": "ipc"}, "cuda", "ipc"),
        ({"weight_transfer": "nccl", "servers": 3}, "cuda", "nccl"),
        ({"weight_transfer": "nccl", "url": "http://gpu-7:8000"}, "cuda", "nccl"),
    ],
)
def test_auto_takes_the_shortest_way_that_reaches_the_server(rollout: Any, device: Any, expected: str) -> None:
    transfer = weight_transfer(spec(**rollout), device)
    assert transfer == expected
    assert weight_backend(transfer) == (expected if expected in ("ipc", "nccl") else "safetensors")


@pytest.mark.parametrize(
    ("rollout", "device"), [({}, "cpu"), ({"servers": 2}, "cpu"), ({"url": "http://127.0.0.1:1"}, "cuda")]
)
def test_ipc_where_no_handle_reaches_is_refused(rollout: Any, device: Any) -> None:
    with pytest.raises(BadInputError, match="weight_transfer is ipc, which needs servers that are started on CUDA"):
        weight_transfer(spec(weight_transfer="ipc", **rollout), device)


@pytest.mark.parametrize(("rollout", "device"), [({}, "cpu"), ({"fleet": "pool"}, "cuda")])
def test_nccl_is_refused_where_nothing_can_be_sent(rollout: Any, device: Any) -> None:
    with pytest.raises(BadInputError, match="weight_transfer is nccl, which needs a trainer on CUDA"):
        weight_transfer(spec(weight_transfer="nccl", **rollout), device)


def test_nccl_takes_one_process_a_device_unless_it_is_asked_for_more() -> None:
    nccl, shared = spec(weight_transfer="nccl", servers=2), Placement(0, (0,))
    with pytest.raises(BadInputError, match="a server shares CUDA device 0 with the trainer's first rank"):
        check_nccl(nccl, shared, {})
    check_nccl(nccl, shared, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    check_nccl(nccl, Placement(1, (0, 2)), {})
    check_nccl(nccl, Placement(2, (0, 2)), {})  # with another rank, which sends nothing
    check_nccl(spec(servers=2), shared, {})
    check_nccl(spec(weight_transfer="nccl", url="http://gpu-7:8000"), shared, {})


def test_servers_are_given_by_one_url_or_several() -> None:
    assert spec().rollout.urls == []
    assert spec(url="http://a:1").rollout.urls == ["http://a:1"]
    assert spec(url=["http://a:1", "https://b"]).rollout.urls == ["http://a:1", "https://b"]
    for wrong in ([], ["http://a", "http://a"], ["gpu-7:8000"], "gpu-7:8000"):
        with pytest.raises(ValueError, match="url"):
            spec(url=wrong)
