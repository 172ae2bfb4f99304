"""What FastAPI lets pass and no caller means: parameters that no route knows, and JSON that says a thing twice."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from nightshift.config.plain import fault_of_numbers
from orchestrator.api.problems import ProblemError

_HALF = re.compile("[\ud800-\udfff]")


class StrictRoute(APIRoute):
    """A route that refuses query parameters it does not have, texts that are none, and a body with repeated keys or odd
    numbers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler behind these checks."""
        handler = super().get_route_handler()
        known = _query_names(self.dependant)
        reads_json = self.body_field is not None

        async def strict(request: Request) -> Response:
            for name, value in request.query_params.multi_items():
                if name not in known:
                    raise _unknown(name, known)
                check_text(name, value)
            if reads_json:
                check_json(await request.body())
            return await handler(request)

        return strict


def strict_router(**options: Any) -> APIRouter:
    """A router whose routes are strict."""
    return APIRouter(route_class=StrictRoute, **options)


def check_json(body: bytes) -> None:
    """Checks what a parser would pass over in silence. A body that is no JSON is left to whoever reads it.

    Raises:
        ProblemError: a key stands twice in one map, or a number is not finite or larger than JSON carries exactly.
    """
    try:
        found = json.loads(body, object_pairs_hook=_no_twice, parse_constant=_not_finite)
        if number := fault_of_numbers(found):
            path, text = number
            detail = f"{path!r} {text}" if path else f"the body {text}"
            raise ProblemError(422, detail, kind="bad-document", errors=[number])
        _check_texts(found, "")
    except (ValueError, RecursionError):
        return


def check_text(name: str, text: str) -> None:
    """Checks that a text is one: databases take no null character, and UTF-8 has no half pairs of UTF-16.

    Raises:
        ProblemError: it is none.
    """
    wrong = "a null character" if "\0" in text else "half a surrogate pair" if _HALF.search(text) else ""
    if wrong:
        raise ProblemError(422, f"{name!r} holds {wrong}", kind="bad-parameter", errors=[(name, f"holds {wrong}")])


def _check_texts(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            check_text(path or "the body", key)
            _check_texts(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _check_texts(item, f"{path}[{at}]")
    elif isinstance(value, str):
        check_text(path or "the body", value)


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            detail = f"the key {key!r} stands twice in one map"
            raise ProblemError(422, detail, kind="bad-document", errors=[(key, "stands twice")])
        found[key] = value
    return found


def _not_finite(text: str) -> Any:
    raise ProblemError(422, f"{text} is no number that JSON knows: numbers must be finite", kind="bad-document")


def _query_names(dependant: Dependant) -> list[str]:
    names = [field.alias for field in dependant.query_params]
    return names + [name for inner in dependant.dependencies for name in _query_names(inner)]


def _unknown(name: str, known: list[str]) -> ProblemError:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        right = f"did you mean {near[0]!r}?"
    else:
        right = f"there are {', '.join(known)}" if known else "there are none here"
    return ProblemError(
        422, f"there is no parameter {name[:64]!r}: {right}", kind="bad-parameter", errors=[(name[:64], right)]
    )
