"""References to code, ``path.py:function`` or ``package.module.function``, checked by reading the source.

Nothing of the user's is run here.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from nightshift.config.rewards import REWARD_PARAMETERS

#: Parameter names that reward functions of other projects have, and the same thing here.
_ALIASES = {
    "solution_str": "response",
    "completion": "response",
    "completions": "response",
    "answer": "ground_truth",
    "label": "ground_truth",
    "prompts": "prompt",
    "extra": "extra_info",
    "kwargs": "**kwargs",
}


#: Keys whose value may be a function of the user's beside a name, and what it is called with.
FUNCTION_ARGUMENTS = {
    "algorithm.estimator": "(batch, config)",
    "algorithm.policy_loss": "(inputs, spec)",
    "data.curriculum": "(prompts, epoch)",
}


def is_reference(text: str) -> bool:
    """Whether the text refers to code, and is not a registered name."""
    return ":" in text or "." in text


def split_reference(text: str) -> tuple[str, str]:
    """Splits ``path.py:function``.

    Raises:
        ValueError: the text is not of that form.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ValueError("must be path.py:function")
    return path, name


def find_source(text: str) -> tuple[Path, str]:
    """The source file and the function's name of ``path.py:function`` or ``package.module.function``.

    Modules are looked up in this process's path; of a package, nothing is imported.

    Raises:
        ValueError: neither form, or there is no such module with a source in Python.
    """
    if ":" in text:
        file, function = split_reference(text)
        return Path(file), function
    module, _, function = text.rpartition(".")
    parts = module.split(".")
    if not all(part.isidentifier() for part in (*parts, function)):
        raise ValueError("is neither path.py:function nor package.module.function")
    # Only the top-level package is looked up: find_spec on a submodule would import its parents.
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):  # __main__, and what a broken finder raises
        spec = None
    if spec is None:
        raise ValueError(f"is not there: there is no module {parts[0]!r} (is it installed, or on PYTHONPATH?)")
    if len(parts) == 1:
        found = [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    else:
        roots = [Path(root).joinpath(*parts[1:]) for root in spec.submodule_search_locations or ()]
        found = [path for root in roots for path in (root / "__init__.py", root.with_suffix(".py")) if path.is_file()]
    if not found:
        raise ValueError(f"is not there: there is no module {module!r} with a source in Python")
    return found[0], function


def check_reference(path: Path, function: str, arguments: str) -> None:
    """Checks that the file holds the function and that it can be called with two arguments.

    Args:
        arguments: what it is called with, a value of FUNCTION_ARGUMENTS.

    Raises:
        ValueError: not so; the message starts with the file or the function.
    """
    try:
        definition = check_function(path, function)
    except ValueError as error:
        raise ValueError(f"file {str(path)!r} {error}") from error
    if definition is None:
        return
    taken = definition.args
    positional = len(taken.posonlyargs) + len(taken.args)
    required = positional - len(taken.defaults)
    keywords = [
        argument.arg for argument, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None
    ]
    if required > 2 or (positional < 2 and taken.vararg is None):
        names = ", ".join(argument.arg for argument in (*taken.posonlyargs, *taken.args))
        raise ValueError(f"function {function!r} takes ({names}), expected {arguments}")
    if keywords:
        raise ValueError(f"function {function!r} asks for the keyword {keywords[0]!r}, expected {arguments}")


Definition = ast.FunctionDef | ast.AsyncFunctionDef


def check_function(path: Path, name: str, *, allow_async: bool = False) -> Definition | None:
    """Looks up the function in the source of ``path``.

    Args:
        allow_async: whether it may be an ``async def``.

    Returns:
        The definition, or None where the name is bound by an import or an assignment and its parameters are unknown.

    Raises:
        ValueError: the file cannot be read or parsed, or holds no such function; the message has no file name in it.
    """
    try:
        module = ast.parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        raise ValueError(f"is not valid Python: line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # null bytes
        raise ValueError(f"is not valid Python: {error}") from error
    functions: dict[str, Definition] = {}
    bound: set[str] = set()
    for statement in _top_level(module.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[statement.name] = statement
        else:
            bound.update(_bound_names(statement))
    found = functions.get(name)
    if isinstance(found, ast.AsyncFunctionDef) and not allow_async:
        raise ValueError(f"defines {name!r} as an async function: an ordinary one is needed")
    if found is None and name not in bound:
        near = difflib.get_close_matches(name, [*functions, *bound], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(functions) or 'no function'}"
        raise ValueError(f"has no function {name!r}{hint}")
    return found


def check_reward_parameters(function: Definition) -> None:
    """Checks that every parameter can be filled by name.

    Raises:
        ValueError: a parameter has a name that no reward function gets; the message starts with the function's name.
    """
    arguments = function.args
    for argument in arguments.posonlyargs:
        raise ValueError(f"{function.name!r} has the positional-only parameter {argument.arg!r}: values come by name")
    with_default = {argument.arg for argument in arguments.args[len(arguments.args) - len(arguments.defaults) :]}
    with_default |= {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    for argument in [*arguments.args, *arguments.kwonlyargs]:
        optional = arguments.kwarg is not None and argument.arg in with_default
        if argument.arg not in REWARD_PARAMETERS and not optional:
            near = difflib.get_close_matches(argument.arg, REWARD_PARAMETERS, n=1)
            right = _ALIASES.get(argument.arg) or (near[0] if near else "")
            hint = f"did you mean {right!r}? " if right else ""
            raise ValueError(
                f"{function.name!r} asks for {argument.arg!r}, which no reward function gets: {hint}"
                f"it may ask for {', '.join(REWARD_PARAMETERS)}, or take **kwargs"
            )


def required_parameters(function: Definition) -> set[str]:
    """The parameters without a default value."""
    arguments = function.args
    required = {argument.arg for argument in arguments.args[: len(arguments.args) - len(arguments.defaults)]}
    return required | {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, also below ``if``, ``try`` and ``with``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _top_level(handler.body)


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
