"""Estimators of the user's own: ``path.py:function`` or ``package.module.function``.

Checking reads the source and runs nothing of it. Loading runs it, so that only the process that computes advantages
(the run's own) ever does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nightshift.config.functions import check_function, split_reference
from nightshift.wire.errors import BadInputError

_KEY = "algorithm.estimator"
_FIXES = {
    _KEY: "An estimator is a function of (batch, config) that returns [N] numbers or N arrays [T_i]",
    "algorithm.policy_loss": "A policy loss is a function of (inputs, spec) that returns [T] losses",
    "data.curriculum": "A curriculum is a function of (prompts, epoch) that returns one number per prompt",
}
_ARGUMENTS = {
    _KEY: "(batch, config)",
    "algorithm.policy_loss": "(inputs, spec)",
    "data.curriculum": "(prompts, epoch)",
}


def is_custom(name: str) -> bool:
    """Whether the name is a reference to code and not a registered name."""
    return ":" in name or "." in name


def check_custom(name: str, key: str = _KEY) -> None:
    """Checks that the function exists and takes two arguments, without running it.

    Args:
        key: of the job file, for messages; ``algorithm.estimator`` is called with (batch, config).

    Raises:
        BadInputError: no such file, module or function, or another signature.
    """
    path, function = _locate(name, key)
    try:
        definition = check_function(path, function)
    except ValueError as error:
        raise _bad(key, name, f"file {str(path)!r} {error}") from error
    if definition is not None and (problem := _signature_problem(definition.args, _ARGUMENTS[key])):
        raise _bad(key, name, f"{function!r} {problem}")


def load_custom(name: str, key: str = _KEY) -> Callable[..., Any]:
    """Runs the file or imports the module, and returns the function.

    Raises:
        BadInputError: as :func:`check_custom`, or the module raises while it is loaded.
    """
    check_custom(name, key)
    try:
        if ":" in name:
            path, function = _locate(name, key)
            module = _run_file(path)
        else:
            dotted, _, function = name.rpartition(".")
            module = importlib.import_module(dotted)
        found = getattr(module, function, None)
    except Exception as error:  # whatever the user's module raises
        raise _bad(key, name, f"loading it raised {type(error).__name__}: {error}") from error
    if not callable(found):
        raise _bad(key, name, f"{function!r} is {type(found).__name__}, not a function")
    estimator: Callable[..., Any] = found
    try:
        inspect.signature(estimator).bind(None, None)
    except TypeError as error:
        raise _bad(key, name, f"{function!r} cannot be called with {_ARGUMENTS[key]}: {error}") from error
    return estimator


def _locate(name: str, key: str) -> tuple[Path, str]:
    """The source file and the function's name."""
    if ":" in name:
        try:
            file, function = split_reference(name)
        except ValueError as error:
            raise _bad(key, name, str(error)) from error
        return Path(file), function
    dotted, _, function = name.rpartition(".")
    parts = dotted.split(".")
    if not all(part.isidentifier() for part in (*parts, function)):
        raise _bad(key, name, "neither path.py:function nor package.module.function")
    # Only the top-level package is looked up: find_spec on a submodule would import its parents.
    spec = importlib.util.find_spec(parts[0])
    if spec is None:
        raise _bad(key, name, f"there is no module {parts[0]!r}")
    if len(parts) == 1:
        found = [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    else:
        roots = [Path(root).joinpath(*parts[1:]) for root in spec.submodule_search_locations or ()]
        found = [path for root in roots for path in (root.with_suffix(".py"), root / "__init__.py") if path.is_file()]
    if not found:
        raise _bad(key, name, f"there is no module {dotted!r} with a source in Python")
    return found[0], function


def _signature_problem(arguments: ast.arguments, wanted: str) -> str:
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    keywords = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    if required > 2 or (positional < 2 and arguments.vararg is None):
        names = ", ".join(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
        return f"takes ({names}), expected {wanted}"
    if keywords:
        return f"asks for the keyword {keywords[0]!r}, expected {wanted}"
    return ""


def _run_file(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"nightshift_custom_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is being run
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _bad(key: str, name: str, cause: str) -> BadInputError:
    return BadInputError(f"{key} {name!r}: {cause}", role="job", fix=_FIXES[key])
