"""The service's refusals as errors."""

from __future__ import annotations

from typing import Any

import httpx

from nightshift.wire.errors import NightshiftError


class ServiceError(NightshiftError):
    """The service refused a request, or cannot be reached.

    Attributes:
        status: HTTP status; 0 where there was no answer.
        problem: the RFC 9457 problem, as it came.
    """

    def __init__(
        self, message: str, *, status: int = 0, problem: dict[str, Any] | None = None, role: str = "", fix: str = ""
    ) -> None:
        super().__init__(message, role=role, fix=fix)
        self.status = status
        self.problem = problem or {}
        self.exit_code = 2 if 400 <= status < 500 and status != 429 else 1

    @property
    def fields(self) -> dict[str, str]:
        """Field -> what is wrong with it."""
        return {str(item["field"]): str(item["message"]) for item in self.problem.get("errors", [])}


def error_of(response: httpx.Response) -> ServiceError:
    """The error that a response stands for; its body has been read."""
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    detail = str(problem.get("detail") or f"the service answered {response.status_code} {response.reason_phrase}")
    wrong = problem.get("errors") or []
    if len(wrong) > 1:
        detail += "".join(f"\n  {item['field']}: {item['message']}" for item in wrong)
    return ServiceError(
        detail, status=response.status_code, problem=problem, role=str(problem.get("role") or "") or "service"
    )
