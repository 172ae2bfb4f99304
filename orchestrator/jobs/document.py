"""Submitted documents, JSON or YAML, as plain values. Nothing in them may expand, repeat a key or run anything."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from nightshift.config.plain import MOST_NODES, MOST_TEXT, fault_of_node, fault_of_numbers, texts
from nightshift.wire.errors import BadInputError

_MAX_DEPTH = 12
_TEXT_TAG = "tag:yaml.org,2002:str"
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.\[\]]*)\}")


class DocumentError(BadInputError):
    """The document cannot be read.

    Attributes:
        status: the HTTP status that fits.
        problems: field and sentence of each error.
    """

    def __init__(self, message: str, *, status: int = 422, problems: list[tuple[str, str]] | None = None) -> None:
        super().__init__(message, role="job")
        self.status = status
        self.problems = problems or []


def read_document(data: bytes, *, is_json: bool) -> dict[str, Any]:
    """A document's top map.

    Raises:
        DocumentError: it is no text, no JSON or YAML, or holds what a submission may not hold.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DocumentError(f"the body is not UTF-8 text: line {line}", status=400) from error
    try:
        value = _read_json(text) if is_json else _read_yaml(text)
    except RecursionError as error:
        raise DocumentError("the body is nested too deeply") from error
    if not isinstance(value, dict):
        what = "empty" if value is None else "a list" if isinstance(value, list) else "plain text"
        raise DocumentError(f"the body is {what}, but must be a map of the job file's sections (name, model, ...)")
    _check_size(value)
    for path, found in texts(value):
        if "\0" in found:
            raise DocumentError(f"{path!r} holds a null character", problems=[(path, "must not hold null characters")])
    if fault := fault_of_numbers(value):
        raise DocumentError(f"{fault[0]!r} {fault[1]}", problems=[fault])
    resolved = resolve_references(value)
    if sum(len(found) for _, found in texts(resolved)) > MOST_TEXT:
        raise DocumentError("the references (${…}) of the body stand for more text than a job can hold")
    return resolved


def resolve_references(document: dict[str, Any]) -> dict[str, Any]:
    """Replaces ``${section.key}`` by the value that stands there.

    A submission may refer to plain values only: references to references could grow without end, and resolvers such as
    ``oc.env`` would read the server's secrets.

    Raises:
        DocumentError: any other use of ``${``.
    """

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, f"{path}.{key}" if path else key) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, f"{path}[{at}]") for at, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _REFERENCE.fullmatch(value)
        found = _lookup(document, match[1]) if match else None
        if match is None or isinstance(found, dict | list) or (isinstance(found, str) and "${" in found):
            raise DocumentError(
                f"{path!r} is {value[:80]!r}: a submission may hold ${{section.key}} for one plain value and no other "
                "interpolation; `nightshift submit` resolves all of them before it sends the job",
                problems=[(path, "this interpolation is not allowed in a submission")],
            )
        return found

    resolved = walk(document, "")
    assert isinstance(resolved, dict)
    return resolved


def _lookup(document: dict[str, Any], path: str) -> Any:
    value: Any = document
    for part in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and len(part) < 10 and int(part) < len(value):
            value = value[int(part)]
        else:
            raise DocumentError(f"${{{path[:80]}}} refers to nothing: there is no {part[:80]!r}")
    return value


def _read_json(text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise DocumentError(f"the key {key!r} stands twice in one map", problems=[(key, "stands twice")])
            found[key] = value
        return found

    def constant(name: str) -> Any:
        raise DocumentError(f"the body is not valid JSON: {name} is no number of JSON", status=400)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except ValueError as error:
        raise DocumentError(f"the body is not valid JSON: {error}", status=400) from error


def _read_yaml(text: str) -> Any:
    try:
        depth = 0
        for nodes, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            if isinstance(event, yaml.AliasEvent):
                raise DocumentError(f"{_line(event)}: aliases (*{event.anchor}) are not allowed in a submission")
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise DocumentError(f"{_line(event)}: tags ({tag}) are not allowed in a submission")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if nodes > MOST_NODES or depth > _MAX_DEPTH:
                raise DocumentError(f"{_line(event)}: the body is larger or nested deeper than a job can be")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if fault := fault_of_node(node):
            raise DocumentError(fault)
        _check_keys(node)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1} of the body" if mark else "the body"
        raise DocumentError(f"{where} is not valid YAML: {error.problem or error.context}", status=400) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date that is none
        raise DocumentError(f"the body is not valid YAML: {str(error).splitlines()[0]}", status=400) from error


def _line(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1}" if event.start_mark else "a line"


def _check_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT_TAG:
                raise DocumentError(f"line {line}: a key must be a name")
            if key.value in seen:
                raise DocumentError(
                    f"line {line}: the key {key.value!r} stands twice in one map",
                    problems=[(key.value, "stands twice")],
                )
            seen.add(key.value)
            _check_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value)


def _check_size(value: Any) -> None:
    level, nodes = [value], 0
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        nodes += len(level)
        if nodes > MOST_NODES:
            break
        if not level:
            return
    raise DocumentError("the body is larger or nested deeper than a job can be")
