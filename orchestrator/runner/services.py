"""Reads ``services.json``: where the roles of a run are. The orchestrator sees URLs, never processes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from nightshift.wire.errors import RoleTimeoutError
from orchestrator.runner.engine import EngineAddress

FILE = "services.json"


@dataclass(frozen=True, slots=True)
class ScorerAddress:
    """A scorer behind an ingress."""

    name: str
    url: str
    application: str


@dataclass(frozen=True, slots=True)
class Services:
    """All roles of a run."""

    rollout: list[EngineAddress]
    rewards: list[ScorerAddress]
    reference: ScorerAddress | None
    trainer_url: str


def read_services(run_dir: Path) -> Services | None:
    """The addresses, or None where the file is not there yet."""
    try:
        raw = json.loads((run_dir / FILE).read_text())
    except FileNotFoundError:
        return None
    rollout = [
        EngineAddress(
            name=item["name"],
            url=item["url"],
            token=item.get("token", ""),
            incarnation=item["incarnation"],
            weight_backend=item.get("weight_backend", "safetensors"),
            init_info=dict(item.get("init_info") or {}),
        )
        for item in raw["rollout"]
    ]
    rewards = [ScorerAddress(item["name"], item["url"], item["application"]) for item in raw["rewards"]]
    reference = raw.get("reference")
    return Services(
        rollout,
        rewards,
        ScorerAddress("reference", reference["url"], reference["application"]) if reference else None,
        raw["trainer"]["url"],
    )


async def wait_for_services(run_dir: Path, timeout_s: float) -> Services:
    """Waits until the agent has written the addresses.

    Raises:
        RoleTimeoutError: they did not appear in time.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline:
        services = read_services(run_dir)
        if services is not None:
            return services
        await asyncio.sleep(0.2)
    raise RoleTimeoutError(
        f"the services of the run did not come up within {timeout_s:g} s",
        role="agent",
        fix=f"Look into {run_dir / 'logs'}",
    )
