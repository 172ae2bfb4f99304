"""What a vLLM server that is known by its URL alone may be used for. Pure: the answers come from the client.

| tier | it has | it may be |
| --- | --- | --- |
| full | versions of its tokens, and takes weights | rollout server of a training run, or anything below |
| versions | token ids in and out, versions; takes no weights | a frozen role: reference, teacher |
| plain | ``/v1/completions`` | a frozen role: reference, teacher |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nightshift.wire.errors import RoleError
from nightshift.wire.rollout import parse_version
from orchestrator.runner.capabilities import GENERATE, SPANS_SINCE, from_info, from_statuses

COMPLETIONS = "/v1/completions"
#: Paths that are asked: with GET, and with an empty POST.
ASKED_BY_GET = ("/is_paused", "/weight_info")
ASKED_BY_POST = (GENERATE, COMPLETIONS)


class Tier(StrEnum):
    """From most to least."""

    FULL = "full"
    VERSIONS = "versions"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a server may be used for.

    Attributes:
        why_not_full: one sentence; "" for a full one.
    """

    tier: Tier
    vllm: str
    why_not_full: str = ""
    fix: str = ""

    @property
    def generate(self) -> bool:
        """Whether it takes token ids on vLLM's own generate route."""
        return self.tier is not Tier.PLAIN


def standing(name: str, info: dict[str, Any] | None, version: str, statuses: dict[str, int]) -> Standing:
    """The tier of a server.

    Args:
        info: answer of our info route; None: it has none.
        version: what it answers at ``/version``; "" for nothing.
        statuses: of the paths that are asked; 403 and 404 mean that a route is not there.

    Raises:
        RoleError: it is none that can be used for anything.
    """
    try:
        found = from_info(name, info) if info is not None else from_statuses(name, version, statuses)
        return Standing(Tier.FULL, found.vllm)
    except RoleError as error:
        why, fix = error.message, error.fix
    there = {path for path, status in statuses.items() if status not in (403, 404)}
    version = str(info.get("vllm_version", version)) if info else version
    if GENERATE in there and (info is not None or parse_version(version) >= SPANS_SINCE):
        return Standing(Tier.VERSIONS, version, why, fix)
    if COMPLETIONS in there:
        return Standing(Tier.PLAIN, version, why, fix)
    raise RoleError(
        f"{name} offers neither {GENERATE} nor {COMPLETIONS}: it is no vLLM server, or serves no language model",
        role="rollout",
        fix="Correct the URL",
    )
