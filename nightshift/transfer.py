"""How published weights reach the rollout servers of a job: by a shared folder, by HTTP, or inside a GPU."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from nightshift.config.job import JobSpec
from nightshift.gpu import Device
from nightshift.wire.errors import BadInputError

Transfer = Literal["shared_memory", "http", "ipc"]

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def weight_transfer(spec: JobSpec, device: Device) -> Transfer:
    """The way of a job's weights, with ``rollout.weight_transfer: auto`` resolved.

    Args:
        device: of the trainer and of servers that are started for the job.

    Raises:
        BadInputError: "ipc" is asked for where no CUDA handle can reach the server.
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
    if rollout.weight_transfer != "auto":
        return rollout.weight_transfer
    if ipc:
        return "ipc"
    remote = rollout.fleet is not None or any(urlsplit(url).hostname not in _LOOPBACK for url in rollout.urls)
    return "http" if remote else "shared_memory"


def weight_backend(transfer: Transfer) -> str:
    """Name of vLLM's weight-transfer engine for it."""
    return "ipc" if transfer == "ipc" else "safetensors"
