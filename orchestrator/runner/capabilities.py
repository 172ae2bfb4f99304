"""What a rollout server can do, and which of its routes to draw from. Pure: the answers come from the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nightshift.wire.errors import RoleError
from nightshift.wire.rollout import INFO, is_supported, parse_version, supported_range

GENERATE = "/inference/v1/generate"
#: Since this version vLLM itself says which weights sampled which token.
SPANS_SINCE = (0, 32)

SLEEP_ROUTES = frozenset({"/sleep", "/wake_up", "/is_sleeping"})
_MIDDLEWARE = "Start it with --middleware services.rollout.route.Route --middleware services.rollout.guard.Guard"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How to speak to a server.

    Attributes:
        vllm: its version as it says it.
        route: whether our own route is there; otherwise vLLM's JSON is used.
        prefetch: whether it fetches weight files ahead of an update.
        keep_cache: whether running responses can keep their cache at an update, without new ones sharing it.
        sleep_routes: whether it has the routes to sleep and wake.
        sleep: whether it also gives its memory back then.
        backend: vLLM's weight-transfer engine that it was started with; "": unknown.
    """

    vllm: str
    route: bool
    prefetch: bool = False
    keep_cache: bool = False
    sleep_routes: bool = False
    sleep: bool = False
    backend: str = ""


def from_info(name: str, info: dict[str, Any]) -> Capabilities:
    """Capabilities of a server that has our route, from the answer of its info route.

    Raises:
        RoleError: it lacks something that is needed; the message names the flag.
    """
    version, found = str(info.get("vllm_version", "")), info.get("capabilities")
    routes = info.get("routes")
    if not isinstance(found, dict) or not isinstance(routes, list):
        raise RoleError(f"{name} answered {INFO} with something else than its capabilities", role="rollout")
    _check_version(name, version)
    if not found.get("pause") or "/update_weights" not in routes:
        raise _lacks(name, "/pause and /update_weights", "Set VLLM_SERVER_DEV_MODE=1 in its environment")
    if not found.get("update_phases"):
        raise _lacks(
            name,
            "weight transfer",
            'Start it with --weight-transfer-config \'{"backend": "safetensors"}\' (ipc or nccl on CUDA); the four '
            "phases of an update exist since vLLM 0.22",
        )
    if not found.get("weight_version"):
        raise _lacks(name, "weight versions from several API servers", "Start it with --api-server-count 1")
    if GENERATE not in routes:
        raise _lacks(name, f"{GENERATE}, which scores the probe", "Start it with --enable-scale-out")
    return Capabilities(
        version,
        route=True,
        prefetch=bool(found.get("prefetch")),
        keep_cache=bool(found.get("keep_cache")),
        sleep_routes=set(routes) >= SLEEP_ROUTES,
        sleep=bool(found.get("sleep")),
        backend=str(info.get("weight_backend") or ""),
    )


def check_backend(name: str, found: Capabilities, wanted: str) -> None:
    """Checks that a server takes weights in the way in which they are published.

    Raises:
        RoleError: it was started for another one.
    """
    if found.backend not in ("", wanted):
        raise RoleError(
            f"vLLM server {name} takes weights by {found.backend!r}, and they are published for {wanted!r}",
            role="rollout",
            fix=f'Start it with --weight-transfer-config \'{{"backend": "{wanted}"}}\', or set rollout.weight_transfer',
        )


def check_sleep(name: str, found: Capabilities) -> None:
    """Checks that a server can sleep.

    Raises:
        RoleError: it cannot; the message names what is missing.
    """
    if not found.sleep_routes:
        fix = "Start it by the job, with VLLM_SERVER_DEV_MODE=1, or leave rollout.sleep_mode out"
        raise _lacks(name, "/sleep, /wake_up and /is_sleeping, which rollout.sleep_mode needs", fix)
    if not found.sleep:
        fix = "Start it with --enable-sleep-mode, or leave rollout.sleep_mode out"
        raise _lacks(name, "its memory to others while it sleeps", fix)


def from_statuses(name: str, version: str, statuses: dict[str, int]) -> Capabilities:
    """Capabilities of a server without our route.

    Args:
        version: what it answers at ``/version``.
        statuses: of a GET of ``/is_paused`` and ``/weight_info`` and of an empty POST of ``GENERATE``; 403 and 404
            mean that the route is not there.

    Raises:
        RoleError: it lacks something that is needed; the message names the flag.
    """
    _check_version(name, version)
    missing = {path for path, status in statuses.items() if status in (403, 404)}
    if "/is_paused" in missing:
        raise _lacks(name, "/pause and /update_weights", "Set VLLM_SERVER_DEV_MODE=1 in its environment")
    if GENERATE in missing:
        raise _lacks(name, GENERATE, "Start it with --enable-scale-out")
    if "/weight_info" in missing or parse_version(version) < SPANS_SINCE:
        raise _lacks(name, f"weight versions of its tokens (vLLM {version})", _MIDDLEWARE)
    return Capabilities(version, route=False)


def _lacks(name: str, what: str, fix: str) -> RoleError:
    return RoleError(f"vLLM server {name} does not offer {what}", role="rollout", fix=fix)


def _check_version(name: str, version: str) -> None:
    if not is_supported(parse_version(version)):
        raise RoleError(
            f"vLLM server {name} has version {version or 'unknown'}",
            role="rollout",
            fix=f"Use a version from {supported_range()}, as in requirements/",
        )
