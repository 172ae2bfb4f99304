"""What a YAML document may stand for, looked at before values are made of it: a few bytes can ask for any amount of
time and memory, by aliases, interpolations, numbers and nesting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

#: Nodes that a document may have once its aliases are written out, and how deep they may be nested.
MOST_NODES, MOST_DEPTH = 20_000, 32
#: Characters that its texts may have together once their references are resolved.
MOST_TEXT = 1 << 20
#: Largest whole number, in amount: JSON and protobuf's JSON carry it exactly (RFC 8259, section 6), a larger one not.
MOST_NUMBER = 1 << 53
#: Characters of a number. ``1:1:1…`` counts in sixties, and takes the square of its length to read.
_MOST_DIGITS = 64
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
_PLAIN = re.compile(r"\$\{\s*(\.*)([^{}:.\s][^{}:\s]*)\s*\}")


def fault_of_node(root: yaml.Node | None) -> str | None:
    """Why a composed document is refused; None: it may be read."""
    sizes: dict[int, tuple[int, int]] = {}
    open_nodes: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        """Nodes and levels of a node, with what its aliases stand for."""
        at = id(node)
        if at in open_nodes:
            raise _FaultError(f"{_line(node)}: an alias stands within what it stands for")
        if at not in sizes:
            open_nodes.add(at)
            nodes, levels = 1, 1
            for inner in _inner(node):
                more, below = measure(inner)
                nodes, levels = nodes + more, max(levels, below + 1)
            if nodes > MOST_NODES or levels > MOST_DEPTH:
                raise _FaultError(f"{_line(node)}: with its aliases this is larger or nested deeper than a job can be")
            if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
                raise _FaultError(f"{_line(node)}: a number of {len(node.value)} characters")
            open_nodes.discard(at)
            sizes[at] = nodes, levels
        return sizes[at]

    try:
        if root is not None:
            measure(root)
    except _FaultError as fault:
        return str(fault)
    except RecursionError:
        return "the document is nested too deeply"
    return None


def fault_of_numbers(value: Any) -> tuple[str, str] | None:
    """Path of the first whole number that is too large, and what is wrong with it; None: there is none."""
    for path, item in _leaves(value, ""):
        if isinstance(item, int) and abs(item) > MOST_NUMBER:
            return path, f"is a whole number of {item.bit_length()} bits, but must lie between -2^53 and 2^53"
    return None


def fault_of_references(values: Any) -> str | None:
    """Why a document's ``${…}`` are refused, which together would grow beyond what a job can be; None: they are not.

    Plain references are followed, absolute and relative ones, to texts and to whole sections. What resolvers such as
    ``oc.env`` give is not counted.
    """
    sizes: dict[tuple[str, ...], int] = {}
    open_paths: set[tuple[str, ...]] = set()

    def measure(value: Any, path: tuple[str, ...]) -> int:
        """Characters of a value once it is resolved."""
        if path in sizes or path in open_paths:  # a circle is for whoever resolves it to name
            return sizes.get(path, 0)
        open_paths.add(path)
        size = 1
        if isinstance(value, Mapping):
            size += sum(measure(item, (*path, str(key))) for key, item in value.items())
        elif isinstance(value, list):
            size += sum(measure(item, (*path, str(at))) for at, item in enumerate(value))
        elif isinstance(value, str):
            size += len(value)
            for dots, name in _PLAIN.findall(value):
                target = (*(path[: -len(dots)] if dots else ()), *name.replace("[", ".").replace("]", "").split("."))
                size += measure(_at(values, target), target)
        open_paths.discard(path)
        if size > MOST_TEXT:
            raise _FaultError(f"{'.'.join(path) or 'the document'}: its references stand for more than a job can be")
        sizes[path] = size
        return size

    try:
        measure(values, ())
    except _FaultError as fault:
        return str(fault)
    except RecursionError:
        return "its references refer to each other too deeply"
    return None


def texts(value: Any) -> Iterator[tuple[str, str]]:
    """Path and value of each text of a document, such as ``("data.files[0]", "a.jsonl")``."""
    return ((path, item) for path, item in _leaves(value, "") if isinstance(item, str))


class _FaultError(Exception):
    pass


def _inner(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{path}[{at}]")
    else:
        yield path, value


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdecimal() and len(part) < 10 and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values
