"""Section ``resources``: machines, cores, folders and ports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nightshift.config.base import Section


class PortsConfig(Section):
    """Ports on loopback; 0: any free one."""

    rollout: int = Field(default=0, ge=0, le=65535)
    """vLLM's HTTP server."""
    scorers: int = Field(default=0, ge=0, le=65535)
    """Ray Serve's gRPC proxy."""
    trainer: int = Field(default=0, ge=0, le=65535)
    """The trainer's gRPC server."""
    weights: int = Field(default=0, ge=0, le=65535)
    """The server of published weights, where ``rollout.weight_transfer`` is http."""
    otlp: int = Field(default=0, ge=0, le=65535)
    """The runner's receiver of spans."""
    metrics: int | None = Field(default=None, ge=0, le=65535)
    """The runner's metrics for Prometheus; null: none are served."""


AgentUrl = Annotated[str, Field(pattern=r"^https?://\S+$")]


class AgentsConfig(Section):
    """Agents on other hosts (``python -m services.agent.host``), each of which starts a role for the job there.

    They ask for the token ``NIGHTSHIFT_AGENT_TOKEN``. Reward functions travel with the job; models must lie there under
    the same path, or the agent's ``--set`` names another.
    """

    trainer: AgentUrl | None = None
    """Starts the trainer, and serves its weights by HTTP; null: this machine does."""
    scorers: AgentUrl | None = None
    """Starts rewards, reference and teacher; with a critic it must be the trainer's. Null: this machine does."""


class ResourcesConfig(Section):
    """What the job may use on this machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where the driver answers, else the CPU."""

    rollout_cores: list[int] | None = None
    """CPU cores of the vLLM server; null: the first one (CPU only)."""

    trainer_cores: list[int] | None = None
    """CPU cores of the trainer; null: the second one, or the first where there is only one (CPU only)."""

    rollout_gpu: int | None = Field(default=None, ge=0)
    """CUDA device of all vLLM servers; null: each has one of those that the trainer leaves free, in turn, or all have
    the trainer's first."""

    trainer_gpus: list[int] | None = None
    """CUDA devices of the trainer's ranks, by rank; null: the first ones."""

    runs_dir: str = "runs"
    """Folder of the runs; relative to the folder in which the command is given."""

    ray_object_store_mib: int = Field(default=128, ge=76)
    """Memory of Ray's object store."""
    weight_store: str = "/dev/shm"
    """Folder in which the published weights lie, in memory."""

    weight_host: str = "127.0.0.1"
    """Name or address under which rollout servers reach the server of published weights, or with NCCL the store from
    which vLLM before 0.32 takes a communicator's id; these listen there alone where it is loopback, else on all
    interfaces. Token and weights travel in the clear: use a network of your own."""

    otlp_host: str = "127.0.0.1"
    """Name or address under which other hosts reach the runner's receiver of spans; it listens there alone where it is
    loopback, else on all interfaces, and asks for no token."""

    agents: AgentsConfig = AgentsConfig()
    ports: PortsConfig = PortsConfig()
