"""Estimators, losses and curricula of the user's own: ``path.py:function`` or ``package.module.function``.

Checking reads the source and runs nothing of it. Loading runs it, so that only the process that calls it ever does: the
run's own for advantages and curricula, the trainer's ranks for losses.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nightshift.config.functions import FUNCTION_ARGUMENTS, check_reference, find_source
from nightshift.wire.errors import BadInputError

_KEY = "algorithm.estimator"
_FIXES = {
    _KEY: "An estimator is a function of (batch, config) that returns [N] numbers or N arrays [T_i]",
    "algorithm.policy_loss": "A policy loss is a function of (inputs, spec) that returns [T] losses",
    "data.curriculum": "A curriculum is a function of (prompts, epoch) that returns one number per prompt",
}


def check_custom(name: str, key: str = _KEY) -> None:
    """Checks that the function exists and takes two arguments, without running it.

    Args:
        key: of the job file, for messages; ``algorithm.estimator`` is called with (batch, config).

    Raises:
        BadInputError: no such file, module or function, or another signature.
    """
    try:
        path, function = find_source(name)
    except ValueError as error:
        raise _bad(key, name, str(error)) from error
    try:
        check_reference(path, function, FUNCTION_ARGUMENTS[key])
    except ValueError as error:
        raise _bad(key, name, str(error)) from error


def load_custom(name: str, key: str = _KEY) -> Callable[..., Any]:
    """Runs the file or imports the module, and returns the function.

    Raises:
        BadInputError: as :func:`check_custom`, or the module raises while it is loaded.
    """
    check_custom(name, key)
    try:
        if ":" in name:
            path, function = find_source(name)
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
        raise _bad(key, name, f"{function!r} cannot be called with {FUNCTION_ARGUMENTS[key]}: {error}") from error
    return estimator


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
