"""Section ``rollout``: sampling and the vLLM servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nightshift.config.base import Section
from nightshift.config.model import DType

Url = Annotated[str, Field(pattern=r"^https?://\S+$")]


class FleetUse(Section):
    """What a job asks of a fleet of shared servers."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the fleet, as `nightshift fleets` lists it."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """Share of the server-seconds, beside those of the other jobs that want servers."""

    min_servers: int = Field(default=0, ge=0)
    """Servers that are not taken from the job while it works, where the fleet has as many as all jobs ask for so."""

    max_servers: int | None = Field(default=None, ge=1)
    """Most servers at one time; null: any number."""

    max_wait_s: float = Field(default=3600.0, gt=0)
    """Longest time without a server, after which the job fails: the others hold on to them, or nobody lends them."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.max_servers is not None and self.min_servers > self.max_servers:
            raise ValueError(f"min_servers {self.min_servers} is more than max_servers {self.max_servers}")
        return self


class RolloutConfig(Section):
    """How responses are sampled, and the server that samples them."""

    batch_size: int = Field(default=8, ge=1)
    """Prompt groups per optimiser step."""

    n: int = Field(default=4, ge=1)
    """Samples per prompt group."""

    max_response_length: int = Field(default=256, ge=1)
    """Longest response in tokens."""

    min_response_length: int = Field(default=0, ge=0)
    """Shortest response in tokens: the ids that end one cannot be sampled before."""

    ignore_eos: bool = False
    """Responses end at ``max_response_length`` alone: forced lengths, for measurements."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, in the sampler and in the trainer."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must stay 1.0: sampling from the likeliest tokens only biases the ratio between trainer and sampler."""
    top_k: int = Field(default=-1, ge=-1)
    """Must stay -1 (off), for the same reason."""

    stop_token_ids: list[int] = Field(default_factory=list)
    """Further ids that end a response; the model's own end-of-sequence ids always do."""

    url: Url | list[Url] | None = None
    """A running vLLM server, or a list of them; null: ``servers`` are started on this machine."""

    servers: int = Field(default=1, ge=1)
    """vLLM servers that are started on this machine, each with cores or a GPU, a port and a KV cache of its own."""

    fleet: FleetUse | None = None
    """A fleet of the job service, whose servers are lent to the job in turns with others: its name, or a section with
    ``name``, ``weight``, ``min_servers`` and ``max_servers``; null: the job has servers of its own."""

    weight_transfer: Literal["auto", "shared_memory", "http", "ipc", "nccl"] = "auto"
    """How published weights reach the servers: a file in ``resources.weight_store``, a download from the trainer's side
    (no shared folder is needed), CUDA IPC, or NCCL; auto: IPC to servers that are started on GPUs of this machine, HTTP
    to servers elsewhere or of a fleet. NCCL needs the same version of NCCL on both sides; servers of ``url`` must have
    been started with ``--weight-transfer-config '{"backend": "nccl"}'``."""

    dtype: DType = "float32"
    """Precision of the server. A bfloat16 server rounds away updates below half a step of the weight."""

    max_model_len: int | None = Field(default=None, ge=8)
    """Context of the server; null: prompt plus response, as long as the model allows it."""

    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that the server decodes at once."""

    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory of the KV cache."""

    sleep_mode: bool = False
    """Server and trainer take turns with the memory of the GPU that they share: the server gives that of its weights
    and KV cache back while the trainer makes a step, and wakes for the new weights; the trainer gives back what it
    holds no more by then. Needs ``pipeline.max_staleness: 0`` and CUDA. In verl it is ``free_cache_engine``."""

    request_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time for one request."""

    stall_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time without a token, although requests run, or without an answer to a health check: then a server hangs
    and is started again."""

    refill: Literal["adaptive", "fixed"] = "adaptive"
    """How many groups are drawn at once: less where the servers' queues and KV caches are full, or always as many as
    the staleness bound allows."""

    flush_tokens: int = Field(default=64, ge=0)
    """Tokens after which a part of a response is sent, so that it outlives its server; 0: only whole responses are."""

    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of the vLLM server."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time until a started server answers."""

    @property
    def own_servers(self) -> int:
        """Servers that are started for the job on this machine."""
        return self.servers if self.url is None and self.fleet is None else 0

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers that somebody else runs."""
        if self.url is None:
            return []
        return [self.url] if isinstance(self.url, str) else self.url

    @field_validator("fleet", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """A fleet may be given by its name alone."""
        return {"name": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _check_urls(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and (not value or len(set(value)) < len(value)):
            raise ValueError(f"the list of servers must name at least one, and none twice, got {value}")
        return value
