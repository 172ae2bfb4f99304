"""pydantic's validation errors as sentences that name the key, the value given and what is right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nightshift.config.rewards import REWARD_TYPES
from nightshift.config.suggest import Path, describe, dotted, keys_at, models_at, suggest

_SHOWN = 80
#: Most errors that are told of one document: to name the nearest key of each takes time, and nobody reads more.
_MOST = 100
#: pydantic's error types -> what is right.
_EXPECTED = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list, such as [first, second]",
    "none_required": "must be null",
}


def show(value: Any) -> str:
    """A value as a user wrote it in YAML, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"a map with {', '.join(map(str, value)) or 'no keys'}"[:_SHOWN]
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def key_path(loc: tuple[int | str, ...]) -> Path:
    """The path in the file: pydantic's location without the tags of unions."""
    path: Path = ()
    for index, part in enumerate(loc):
        is_tag = index > 0 and isinstance(loc[index - 1], int) and part in REWARD_TYPES
        if not is_tag:
            path = (*path, part)
    return path


def explain(error: ErrorDetails) -> str:
    """One validation error as one sentence without its full stop."""
    path = key_path(error["loc"])
    kind, name, value = error["type"], dotted(path), error["input"]
    if kind == "extra_forbidden":
        return f"unknown key {name!r}: {suggest(path)}"
    if kind == "missing":
        meaning = describe(path)
        return f"{name!r} is missing" + (f": {meaning[0].lower()}{meaning[1:]}" if meaning else "")
    if kind in ("value_error", "assertion_error"):
        return str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        known = ", ".join(keys_at(path)) if models_at(path) else ""
        return f"{name!r} is {show(value)}, but must be a map" + (f" of the keys {known}" if known else "")
    return f"{name!r} is {show(value)}, but {expected(error)}"


def expected(error: ErrorDetails) -> str:
    """What would be right in place of a wrong value: ``must be a whole number``."""
    kind = error["type"]
    if kind == "string_pattern_mismatch":
        return f"must match {error['ctx']['pattern']}"
    if kind in ("too_short", "too_long"):
        least, most = error["ctx"].get("min_length"), error["ctx"].get("max_length")
        return f"must hold at least {least}" if kind == "too_short" else f"must hold at most {most}"
    text = _EXPECTED.get(kind) or re.sub(r"^(Input|String|Value) should (be )?", "must be ", error["msg"])
    return text.replace("must be have", "must have")


def explain_value(error: ErrorDetails) -> str:
    """One validation error of a value that belongs to no job file, without its name: ``is 0, but must be …``."""
    kind = error["type"]
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not known here"
    if kind in ("value_error", "assertion_error") and "error" in error.get("ctx", {}):
        return str(error["ctx"]["error"])
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return f"is {show(error['input'])}, but must be a map"
    return f"is {show(error['input'])}, but {expected(error)}"


def explain_all(errors: ValidationError) -> list[tuple[Path, str]]:
    """Errors with their key paths, in the order of the file's sections; of very many, the first ones."""
    return [(key_path(error["loc"]), explain(error)) for error in errors.errors(include_url=False)[:_MOST]]
