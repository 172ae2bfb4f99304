"""Writes docs/configuration.md from the models of the job file; with ``--stdout`` it prints the page instead."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nightshift.config import JobSpec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Job file

<!-- Made by scripts/configuration_reference.py (make docs) from nightshift/config: change the models, not this. -->

A job file is YAML. Unknown keys are refused, with the nearest right one. `${section.key}` refers to another value, and
`section.key=value` on the command line changes one:

    nightshift run examples/first_run/job.yaml trainer.total_steps=4 rollout.temperature=0.8

Paths are relative to the job file unless the key says otherwise. The values that a run used, with all defaults, are in
`job.yaml` of its folder. A commented file to start from is
[examples/first_run/job.yaml](../examples/first_run/job.yaml).
"""

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def type_name(annotation: Any) -> str:
    """The type as a reader of YAML knows it: ``int``, ``list of text``, ``eager | sdpa``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " \\| ".join(type_name(argument) for argument in arguments)
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.__name__
    names = {str: "text", int: "int", float: "number", bool: "true \\| false"}
    if annotation in names:
        return names[annotation]
    raise TypeError(f"no name for type {annotation!r} in the reference page: add one to type_name")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The section models that an annotation names, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def bounds(info: FieldInfo) -> str:
    """The limits of a number or the length of a list, e.g. ``≥ 1``."""
    found = [f"{sign} {getattr(m, name)}" for m in info.metadata for name, sign in BOUNDS.items() if hasattr(m, name)]
    found += [f"at least {m.min_length} entry" for m in info.metadata if getattr(m, "min_length", None)]
    return ", ".join(found)


def default(info: FieldInfo) -> str:
    """The default as YAML writes it."""
    if info.is_required():
        return "required"
    return f"`{json.dumps(info.get_default(call_default_factory=True))}`"


def prose(text: str | None) -> str:
    """Docstring to one line of Markdown: reStructuredText's double backquotes become single ones."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join((text or "").split())).replace("|", "\\|")


def section(title: str, level: int, model: type[BaseModel]) -> str:
    """A heading, the model's docstring and a table of its keys; nested sections follow."""
    paragraphs = [prose(part) for part in inspect.getdoc(model).split("\n\n")] if model.__doc__ else []  # type: ignore[union-attr]
    lines, nested = [], []
    for key, info in model.model_fields.items():
        inner = models_in(info.annotation)
        if inner:
            nested += [(f"{title}.{key}", one) for one in inner]
            continue
        kind = ", ".join(part for part in (type_name(info.annotation), bounds(info)) if part)
        lines.append(f"| `{key}` | {kind} | {default(info)} | {prose(info.description)} |")
    table = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *lines] if lines else []
    parts = [f"{'#' * level} `{title}`", *paragraphs, "\n".join(table)]
    parts += [section(name, level + 1, one) for name, one in nested]
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """The whole page."""
    top, parts = [], []
    for key, info in JobSpec.model_fields.items():
        inner = models_in(info.annotation)
        if not inner:
            top.append(f"- `{key}` ({type_name(info.annotation)}, {default(info)}): {prose(info.description)}")
        elif len(inner) == 1:
            parts.append(section(key, 2, inner[0]))
        else:
            introduction = f"## `{key}`\n\nA list; each entry is one of the following, told apart by `type`."
            named = [(f"{key}: {one.model_fields['type'].default}", one) for one in inner]
            parts.append("\n\n".join([introduction, *(section(name, 3, one) for name, one in named)]))
    return "\n\n".join([INTRODUCTION.rstrip(), "## Top level\n\n" + "\n".join(top), *parts]) + "\n"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdout", action="store_true", help="print the page")
    if parser.parse_args().stdout:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
