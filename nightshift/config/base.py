"""What every section of a job file shares."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A section of the job file: unknown keys are refused, values are checked on assignment too.

    Numbers may be written as text in YAML ("8"), since overrides on a command line are text; a bool is never a number.
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false where only numbers are meant: pydantic would read them as 1 and 0."""
        name = info.field_name
        return value if name is None else _check_number(value, cls.model_fields[name].annotation)


def _check_number(value: Any, annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Literal:
        return _as_literal(value, get_args(annotation))
    if origin in (list, tuple):
        inner = get_args(annotation)[:1]
        return [_check_number(item, inner[0]) for item in value] if inner and isinstance(value, list) else value
    kinds = get_args(annotation) if origin in (Union, types.UnionType) else (annotation,)
    if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
        raise PydanticCustomError("bool_as_number", "must be a number, not true or false")
    return value


def _as_literal(value: Any, choices: tuple[Any, ...]) -> Any:
    """Reads text as the number it names where the choices are numbers; true is not 1."""
    if isinstance(value, bool) and not any(choice is value for choice in choices):
        raise PydanticCustomError("bool_as_number", "must be one of {choices}", {"choices": _join(choices)})
    if isinstance(value, str) and value not in choices:
        for choice in choices:
            if isinstance(choice, int) and value.strip() == str(choice):
                return choice
    return value


def _join(choices: tuple[Any, ...]) -> str:
    return ", ".join(str(choice) for choice in choices)
