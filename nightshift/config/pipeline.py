"""Section ``pipeline``: how generation, scoring and training overlap."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nightshift.config.base import Section


class PipelineConfig(Section):
    """One scheduler, one bound: ``max_staleness``."""

    max_staleness: int | None = Field(default=1, ge=0)
    """Policy versions between a token and the update that uses it: 0 synchronous, 1 one step ahead, null unbounded."""

    on_stale: Literal["wait", "drop"] = "wait"
    """An update that would make a running group too old waits for it, or is made and the group dropped."""

    streaming: bool = True
    """An update begins with the groups that are ready and takes the others as they come, in place of waiting for its
    whole batch; the loss is the same. Off where an advantage needs the whole batch (whitening, an estimator that says
    so, one of your own), and in deterministic runs."""

    deterministic: bool = False
    """Fixes everything that timing could touch; needs max_staleness 0. Two runs with one seed give the same weights."""

    max_groups_in_flight: int | None = Field(default=None, ge=1)
    """Cap on prompt groups that are generated or scored at once; null: what the staleness bound allows."""

    weight_update: Literal["in_flight", "drain"] = "in_flight"
    """Weights change under running requests, or after they have ended."""

    keep_cache: bool = True
    """Responses that run on through a weight update keep the keys and values that earlier weights computed, where their
    server can keep new requests from these; off: the server computes them anew, which takes it a while at each update.
    Either way a token's log-prob is that of the distribution that it was drawn from."""

    buffer_mib: int = Field(default=1024, ge=1)
    """Bytes of experience held; a full buffer stops the start of new groups."""

    retries: int = Field(default=3, ge=0)
    """Attempts after the first for one request to a server or a scorer, or for an update, with growing pauses."""

    failure_budget: float = Field(default=0.5, ge=0, le=1)
    """Share of unscored or failed samples in one batch above which the job fails and quotes the first cause."""

    role_timeout_s: float = Field(default=600.0, gt=0)
    """How long a role that is away may delay the job before the job fails with that role named."""
