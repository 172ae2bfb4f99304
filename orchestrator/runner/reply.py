"""A whole answer of a server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from orchestrator.runner.answers import EngineAwayError


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The body, decoded.

        Raises:
            ValueError: it is no JSON.
        """
        return json.loads(self.content)


def object_of(answer: Reply, name: str, path: str) -> dict[str, Any]:
    """The JSON object of an answer; {} for one of another kind.

    Raises:
        EngineAwayError: it is no JSON.
    """
    try:
        value = answer.json() if answer.content else {}
    except (ValueError, RecursionError) as error:  # no JSON, or one that is thousands of levels deep
        raise EngineAwayError(f"{name} answered {path} with something else than JSON") from error
    return value if isinstance(value, dict) else {}
