"""The user's reward function: loading it, calling it by name, and judging what it returns."""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.util
import inspect
import logging
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from nightshift.wire.errors import BadInputError

_log = logging.getLogger(__name__)
#: What a reward function may ask for, by these names.
ARGUMENTS = ("prompt", "response", "response_ids", "ground_truth", "data_source", "extra_info", "finish_reason")
#: Key of a sample that stands for a batch; it holds the samples.
BATCH = "batch"
_MODULE = "nightshift_user_reward"
_ACCEPTED = "a float, an int, a bool, or a map with 'score'"
_FRAMES = 12  # of a traceback
_TEXT = 4000  # characters of a traceback


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one return value means. ``score`` is None where ``error_type`` is not empty."""

    score: float | None
    parts: dict[str, float] = field(default_factory=dict)
    error_type: str = ""  # "", "raised", "type", "not_finite" or "none"
    error: str = ""
    many: list[Judgement] | None = None  # of each sample of a batch


def split_reference(reference: str) -> tuple[Path, str]:
    """Splits ``path.py:function``.

    Raises:
        BadInputError: the text has another form, or there is no such file.
    """
    text, separator, name = reference.rpartition(":")
    if not separator or not text or not name.isidentifier():
        raise _refused(f"{reference!r} is not of the form path.py:function", "Name the file and the function in it")
    path = Path(text).absolute()
    if not path.is_file():
        raise _refused(f"there is no file {path}", "Correct rewards[].function")
    return path, name


class RewardFunction:
    """A user's function with its argument names.

    Args:
        path: the file.
        name: the function in it.
        source: the file's text. Passed in, so that a worker that is started later runs what the job began with, even
            where the file has been edited since.

    Raises:
        BadInputError: the file cannot be imported, has no such function, or the function asks for something else than
            ``ARGUMENTS``.
    """

    def __init__(self, path: Path, name: str, source: str) -> None:
        self.path = path
        self.name = name
        module = _import(path, source)
        function = getattr(module, name, None)
        if function is None:
            raise _refused(f"{path} has no function {name!r}", _did_you_mean(name, module))
        if not callable(function):
            raise _refused(f"{name!r} in {path} is a {type(function).__name__}, not a function", "Name a function")
        self._function: Callable[..., Any] = function
        self._names = _argument_names(function, path, name)
        self._runner: asyncio.Runner | None = None
        self._told = False

    def __call__(self, sample: Mapping[str, Any]) -> Judgement:
        """Calls the function on one sample (a nightshift.wire.scoring.RewardInput) and judges the result.

        Whatever the function raises, ``SystemExit`` included, becomes a judgement with the traceback from the user's
        file on.
        """
        batch = sample.get(BATCH)
        try:
            if batch is None:
                result = self._function(**{name: sample.get(name) for name in self._names})
            else:
                result = self._function(**{name: [item.get(name) for item in batch] for name in self._names})
            if inspect.isawaitable(result):
                result = self._run(result)
            self._say_if_moved(result)
            return judge(result, self.name) if batch is None else judge_batch(result, self.name, len(batch))
        except BaseException as error:
            return Judgement(None, error_type="raised", error=describe(error, self.path))

    def _say_if_moved(self, result: Any) -> None:
        """Says once that a tensor is taken for what it holds: off its device, as floats of Python."""
        score = result.get("score") if isinstance(result, Mapping) else result
        if self._told or isinstance(score, np.ndarray | np.generic) or not hasattr(score, "tolist"):
            return
        self._told = True
        where = f" on {score.device}" if hasattr(score, "device") else ""
        kind = f"{type(score).__name__} of {getattr(score, 'dtype', 'unknown dtype')}{where}"
        _log.warning("[reward] function %s returned a %s: its values are taken as floats", self.name, kind)

    def _run(self, awaitable: Any) -> Any:
        # One loop for all calls: a session that the function keeps between calls belongs to its loop.
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())


def judge(value: Any, function: str) -> Judgement:
    """What a return value means (nothing is parsed: the text "0.7" is an error, not 0.7).

    Of a map, ``score`` is judged; its other items are kept where they are finite numbers, and left out otherwise.
    """
    parts: dict[str, float] = {}
    score = value
    if isinstance(value, Mapping):
        if "score" not in value:
            return _type_error(f"function {function} returned a map without 'score': {_short(value)}")
        score = value["score"]
        for key, item in value.items():
            number = _number(item)
            if key != "score" and isinstance(key, str) and number is not None and math.isfinite(number):
                parts[_encodable(key)] = number
    if score is None:
        error = f"function {function} returned None: expected {_ACCEPTED}"
        return Judgement(None, parts, "none", error)
    number = _number(score)
    if number is None:
        shown = f"{_short(score)} ({type(score).__name__})"
        return _type_error(f"function {function} returned {shown}: expected {_ACCEPTED}")
    if not math.isfinite(number):
        error = f"function {function} returned {number}: expected a finite number"
        return Judgement(None, parts, "not_finite", error)
    return Judgement(number, parts)


def judge_batch(values: Any, function: str, samples: int) -> Judgement:
    """What the list that a batched function returned means."""
    if hasattr(values, "tolist"):  # an array or tensor, on whatever device
        values = values.tolist()
    if not isinstance(values, list | tuple) or len(values) != samples:
        found = f"{len(values)} results" if isinstance(values, list | tuple) else _short(values)
        return _type_error(f"function {function} returned {found} for a batch of {samples} samples: expected a list")
    return Judgement(None, many=[judge(value, function) for value in values])


def describe(error: BaseException, path: Path) -> str:
    """An exception as text: the traceback from the first frame of the user's file on, then the exception."""
    user_frames = error.__traceback__
    while user_frames is not None and user_frames.tb_frame.f_code.co_filename != str(path):
        user_frames = user_frames.tb_next
    report = traceback.TracebackException(type(error), error, user_frames, limit=_FRAMES)
    text = _encodable("".join(report.format()).strip())
    return text if len(text) <= _TEXT else f"{text[: _TEXT // 2]}\n[...]\n{text[-_TEXT // 2 :]}"


class _SourceLoader(importlib.abc.ExecutionLoader):
    """Imports a text as if it were read from a file."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_source(self, fullname: str) -> str:
        return self._source

    def is_package(self, fullname: str) -> bool:
        return False


def _import(path: Path, source: str) -> ModuleType:
    loader = _SourceLoader(path, source)
    spec = importlib.util.spec_from_loader(_MODULE, loader, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # for modules beside the file
    sys.modules[_MODULE] = module  # dataclasses look their module up here
    try:
        loader.exec_module(module)
    except BaseException as error:
        raise _refused(
            f"{path} cannot be imported: {_cause(error, path)}", "Correct the file, or install what it imports"
        ) from error
    return module


def _cause(error: BaseException, path: Path) -> str:
    """The exception in one line, with the line of the user's file."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{text} (line {error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{text} (line {lines[-1]})" if lines else text


def _argument_names(function: Callable[..., Any], path: Path, name: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise _refused(
            f"the signature of {name!r} in {path} cannot be read: {error}", "Name a Python function"
        ) from error
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            return ARGUMENTS
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        required = parameter.default is parameter.empty
        if parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
            names.append(parameter.name)
        elif required:
            why = "is positional only" if parameter.kind is parameter.POSITIONAL_ONLY else "is not known"
            raise _refused(
                f"function {name!r} in {path} asks for {parameter.name!r}, which {why}",
                f"Arguments are passed by name, any of: {', '.join(ARGUMENTS)}",
            )
    return tuple(names)


def _number(value: Any) -> float | None:
    if isinstance(value, numbers.Real | np.bool_):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if getattr(value, "shape", None) == () and hasattr(value, "tolist"):
        return _number(value.tolist())  # a tensor of one value and no dimension, on whatever device
    return None


def _type_error(message: str) -> Judgement:
    return Judgement(None, error_type="type", error=message)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's class may have a broken __repr__
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    text = _encodable(text)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _encodable(text: str) -> str:
    """Text without lone surrogates, which have no place on the wire."""
    return text.encode("utf-8", "backslashreplace").decode()


def _did_you_mean(name: str, module: ModuleType) -> str:
    own = [key for key, item in vars(module).items() if inspect.isroutine(item) and item.__module__ == _MODULE]
    return f"It has: {', '.join(sorted(own))}" if own else "It has no function at all"


def _refused(message: str, fix: str) -> BadInputError:
    return BadInputError(message, role="reward", fix=fix)
