"""How the runner asks the agent to start a server again: one small file in the run's folder per server.

The runner sees that a server hangs, since it knows what it asked of it; only the agent can end and start processes. A
request names the start of the server that it means, so that one that comes too late does no harm.
"""

from __future__ import annotations

import json
from pathlib import Path

_PREFIX = "restart-"


def ask_restart(run_dir: Path, name: str, incarnation: str, cause: str) -> None:
    """Asks for another start of a server; a request that nobody has taken yet is replaced.

    Args:
        name: of the server.
        incarnation: the start of it that is meant.
        cause: why, for people.
    """
    path = _path(run_dir, name)
    part = path.with_suffix(".tmp")
    part.write_text(json.dumps({"incarnation": incarnation, "cause": cause}))
    part.replace(path)


def take_restart(run_dir: Path, name: str, incarnation: str) -> str | None:
    """Takes a request for a server away; its cause where it means this start of it, else None."""
    path = _path(run_dir, name)
    try:
        request = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        request = None
    path.unlink(missing_ok=True)
    if not isinstance(request, dict) or request.get("incarnation") != incarnation:
        return None
    return str(request.get("cause") or "the runner asked for it")


def _path(run_dir: Path, name: str) -> Path:
    return run_dir / f"{_PREFIX}{name}.json"
