"""What the rollout service and the orchestrator agree on: the own routes of a server, and the versions of vLLM."""

from __future__ import annotations

import re

#: Our own routes inside vLLM's server.
ROUTE = "/nightshift/v1/generate"
INFO = "/nightshift/v1/info"
PREFETCH = "/nightshift/v1/prefetch"
REQUESTS = "/nightshift/v1/requests"

#: Headers of an answer of REQUESTS: which file its bytes are from, and how many bytes that file has.
LOG_ID, LOG_SIZE = "x-nightshift-log", "x-nightshift-log-size"

#: Versions of vLLM (major, minor) whose routes and signatures are recorded and tested.
OLDEST, NEWEST = (0, 26), (0, 33)


def parse_version(version: str) -> tuple[int, int]:
    """Major and minor version; (0, 0) where the text is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_supported(version: tuple[int, int]) -> bool:
    """Whether the version lies in the range."""
    return OLDEST <= version <= NEWEST


def supported_range() -> str:
    """The range in words."""
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
