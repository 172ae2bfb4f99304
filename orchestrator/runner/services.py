"""Reads ``services.json``: where the roles of a run are. The orchestrator sees URLs, never processes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightshift.wire.errors import RoleTimeoutError
from orchestrator.runner.engine import EngineAddress

FILE = "services.json"


@dataclass(frozen=True, slots=True)
class ScorerAddress:
    """A scorer behind an ingress."""

    name: str
    url: str
    application: str
    token: str = ""  # that calls must carry; "": none


@dataclass(frozen=True, slots=True)
class FilesAddress:
    """The run's folder on another host, as the agent there serves it."""

    url: str
    token: str
    root: str  # the folder's path on that host


@dataclass(frozen=True, slots=True)
class TrainerAddress:
    """A trainer, and which start of it: one that was started again holds no weights of the run."""

    url: str
    incarnation: str
    critic_url: str = ""  # of the critic's trainer, which is started and lost together with it
    token: str = ""  # that calls must carry; "": none
    files: FilesAddress | None = None  # None: it writes into the run's folder itself


@dataclass(frozen=True, slots=True)
class Services:
    """All roles of a run."""

    rollout: list[EngineAddress]
    rewards: list[ScorerAddress]
    reference: ScorerAddress | None
    trainer: TrainerAddress | None  # None while it is being started again
    metrics: list[str] = field(default_factory=list)  # host:port of further processes that Prometheus can scrape
    teacher: ScorerAddress | None = None
    critic: ScorerAddress | None = None
    #: Of servers that the run is lent: the engine that takes weights, and where these come from.
    lent: tuple[str, dict[str, Any]] = ("safetensors", {})


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
            managed=bool(item.get("pid")),
        )
        for item in raw["rollout"]
    ]
    rewards = [
        ScorerAddress(item["name"], item["url"], item["application"], item.get("token", "")) for item in raw["rewards"]
    ]
    trainer, lent = raw.get("trainer"), raw.get("lent") or {}
    reference, teacher, critic = (
        ScorerAddress(role, found["url"], found["application"], found.get("token", ""))
        if (found := raw.get(role))
        else None
        for role in ("reference", "teacher", "critic")
    )
    return Services(
        rollout,
        rewards,
        reference,
        _trainer(trainer) if trainer else None,
        list(raw.get("metrics") or []),
        teacher,
        critic,
        (lent.get("weight_backend", "safetensors"), dict(lent.get("init_info") or {})),
    )


def _trainer(entry: dict[str, Any]) -> TrainerAddress:
    files = entry.get("files")
    return TrainerAddress(
        entry["url"],
        entry.get("incarnation", ""),
        entry.get("critic_url", ""),
        entry.get("token", ""),
        FilesAddress(files["url"], files["token"], files["root"]) if files else None,
    )


async def wait_for_services(
    run_dir: Path, timeout_s: float, lost: TrainerAddress | None = None
) -> tuple[Services, TrainerAddress]:
    """Waits until the agent has written the addresses of all roles.

    Args:
        lost: a trainer that cannot go on: another one is waited for.

    Returns:
        The addresses, and that of the trainer.

    Raises:
        RoleTimeoutError: they did not appear in time.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline:
        services = read_services(run_dir)
        if services is not None and services.trainer is not None and services.trainer != lost:
            return services, services.trainer
        await asyncio.sleep(0.2)
    raise RoleTimeoutError(
        f"the trainer was not started again within {timeout_s:g} s"
        if lost
        else f"the services of the run did not come up within {timeout_s:g} s",
        role="trainer" if lost else "agent",
        fix=f"Look into {run_dir / 'logs'}",
    )
