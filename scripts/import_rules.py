"""Checks the direction of imports between the rooms; prints each breach as path:line and exits with 1.

- ``nightshift`` imports no heavy library, neither ``services`` nor ``orchestrator``.
- ``orchestrator`` imports ``nightshift`` and no heavy library, no service.
- a service imports ``nightshift`` and itself; ``services.agent``, which starts the others, may import them.

Imports inside functions count as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HEAVY = frozenset({"torch", "ray", "vllm", "deepspeed", "transformers"})
ROOMS = ("nightshift", "orchestrator", "services")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and dotted name of each import; ``from a.b import c`` gives ``a.b.c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def forbidden(module: tuple[str, ...], name: str) -> str | None:
    """Why a module (as its path's parts, e.g. ``("services", "trainer", "rank")``) may not import a name, or None."""
    room, target = module[0], name.split(".")
    if room in ("nightshift", "orchestrator") and target[0] in HEAVY:
        return f"{room} must not import {target[0]}"
    if room == "nightshift" and target[0] in ("orchestrator", "services"):
        return f"nightshift must not import {target[0]}"
    if room == "orchestrator" and target[0] == "services":
        return "orchestrator must not import services"
    if room == "services":
        if target[0] == "orchestrator":
            return "services must not import orchestrator"
        own = module[1] if len(module) > 1 else ""
        if target[0] == "services" and len(target) > 1 and target[1] != own and own != "agent":
            return f"services.{own} must not import services.{target[1]}"
    return None


def breaches(root: Path) -> list[str]:
    """All breaches below a folder that holds the rooms."""
    found = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            relative = path.relative_to(root)
            for line, name in imported(ast.parse(path.read_text(encoding="utf-8"), str(path))):
                why = forbidden(relative.with_suffix("").parts, name)
                if why:
                    found.append(f"{relative}:{line}: {why} ({name})")
    return found


def main() -> int:
    """Checks the repository that this file lies in."""
    found = breaches(Path(__file__).resolve().parent.parent)
    for breach in found:
        print(breach, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
