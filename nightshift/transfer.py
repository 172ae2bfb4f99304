"""How published weights reach the servers of a job: by a shared folder, by HTTP, inside GPUs, or between them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from nightshift.config.job import JobSpec
from nightshift.gpu import Device, Placement
from nightshift.wire.errors import BadInputError
from nightshift.wire.listen import LOOPBACK

Transfer = Literal["shared_memory", "http", "ipc", "nccl"]

#: NCCL's own variable.
_SEVERAL_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def weight_transfer(spec: JobSpec, device: Device) -> Transfer:
    """The way of a job's weights, with ``rollout.weight_transfer: auto`` resolved.

    Args:
        device: of the trainer and of servers that are started for the job.

    Raises:
        BadInputError: "ipc" is asked for where no CUDA handle can reach the servers, or "nccl" without CUDA or of a
            fleet.
    """
    rollout = spec.rollout
    if spec.resources.agents.trainer is not None:
        return "http"
    ipc = device == "cuda" and rollout.own_servers > 0
    if rollout.weight_transfer == "ipc" and not ipc:
        raise BadInputError(
            "rollout.weight_transfer is ipc, which needs servers that are started on CUDA devices of the trainer's "
            "machine",
            role="rollout",
            fix="Set it to auto",
        )
    if rollout.weight_transfer == "nccl" and (device != "cuda" or rollout.fleet is not None):
        raise BadInputError(
            "rollout.weight_transfer is nccl, which needs a trainer on CUDA, and servers that are started for the job "
            "or named by rollout.url",
            role="rollout",
            fix="Set it to auto",
        )
    if rollout.weight_transfer != "auto":
        return rollout.weight_transfer
    if ipc:
        return "ipc"
    remote = rollout.fleet is not None or any(urlsplit(url).hostname not in LOOPBACK for url in rollout.urls)
    return "http" if remote else "shared_memory"


def weight_backend(transfer: Transfer) -> str:
    """Name of vLLM's weight-transfer engine for it."""
    return transfer if transfer in ("ipc", "nccl") else "safetensors"


def check_nccl(spec: JobSpec, placement: Placement | None, environment: Mapping[str, str] = os.environ) -> None:
    """Checks that no server has a device together with the trainer's first rank, where NCCL is to send it weights.

    Args:
        placement: which CUDA device each role has; None on a CPU.

    Raises:
        BadInputError: one has: NCCL takes one process a device.
    """
    rollout = spec.rollout
    if rollout.weight_transfer != "nccl" or placement is None or not rollout.own_servers:
        return
    alone = environment.get(_SEVERAL_VARIABLE) != "1"  # NCCL 2.30 and later take several where it is asked for
    if alone and placement.trainer[0] in placement.servers(rollout.servers):
        raise BadInputError(
            f"rollout.weight_transfer is nccl, and a server shares CUDA device {placement.trainer[0]} with the "
            "trainer's first rank, which NCCL refuses",
            role="rollout",
            fix="Set it to auto, or resources.trainer_gpus and rollout_gpu to different devices",
        )
