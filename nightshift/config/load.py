"""Reading and writing job files."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from nightshift.config import suggest
from nightshift.config.files import resolve_files
from nightshift.config.job import JobSpec
from nightshift.config.messages import explain_all
from nightshift.config.plain import fault_of_node, fault_of_numbers, fault_of_references
from nightshift.wire.errors import BadInputError

_ROLE = "job"
#: Of a job file.
MOST_BYTES = 1 << 20


def load_job(path: str | Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> JobSpec:
    """Reads a job file, applies ``key=value`` overrides and checks the result.

    Paths become absolute: those of the job file and of the overrides are relative to the job file's folder,
    ``resources.runs_dir`` to the current one.

    Args:
        check_files: also check that the named files and reward functions exist.

    Raises:
        BadInputError: with every error that was found, one a line.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInputError(f"{path} is larger than a job file can be (1 MiB)", role=_ROLE)
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"cannot read the job file {str(path)!r}: {error.strerror}", role=_ROLE) from error
    return parse_job(data, path.resolve().parent, overrides, source=str(path), check_files=check_files)


def parse_job(
    data: bytes, base: Path, overrides: Sequence[str] = (), *, source: str = "job", check_files: bool = True
) -> JobSpec:
    """Like :func:`load_job`, for a job file's bytes. ``source`` names it in messages."""
    config = read_yaml(data, source)
    for override in overrides:
        _apply(config, override)
    if fault := fault_of_references(OmegaConf.to_container(config, resolve=False)):
        raise BadInputError(f"{source}: {fault}", role=_ROLE)
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        text = str(error).splitlines()[0]
        raise BadInputError(f"{source}: {where}{text}", role=_ROLE) from error
    if number := fault_of_numbers(values):
        raise BadInputError(f"{source}: {number[0]!r} {number[1]}", role=_ROLE)
    try:
        spec = JobSpec.model_validate(values)
    except ValidationError as errors:
        lines = _key_lines(data)
        for override in overrides:  # what an override set does not stand in the file
            lines.pop(parse_key(override.partition("=")[0].strip()), None)
        found = [_locate(lines, path, text) for path, text in explain_all(errors)]
        raise _bad_input(source, found) from errors
    if problems := resolve_files(spec, base, check=check_files):
        raise _bad_input(source, problems)
    return spec


def write_resolved(spec: JobSpec, path: str | Path) -> None:
    """Writes the job as it will run, by rename."""
    path = Path(path)
    # Escaped rather than raw: some line-break characters (U+0085) come back as another text otherwise.
    text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_resolved(path: str | Path) -> JobSpec:
    """Reads what :func:`write_resolved` wrote: no interpolation, no overrides, no file checks.

    Raises:
        BadInputError: the file is absent or is not a resolved job.
    """
    try:
        return JobSpec.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise BadInputError(f"cannot read {str(path)!r}: {error.strerror}", role=_ROLE) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path} is not valid YAML: {error}", role=_ROLE) from error
    except ValidationError as errors:
        raise _bad_input(str(path), [text for _, text in explain_all(errors)]) from errors


def _bad_input(source: str, problems: list[str]) -> BadInputError:
    if len(problems) == 1:
        return BadInputError(f"{source}: {problems[0]}", role=_ROLE)
    listed = "".join(f"\n  {problem}" for problem in problems)
    return BadInputError(f"{source} has {len(problems)} errors:{listed}", role=_ROLE)


def read_yaml(data: bytes, source: str) -> DictConfig:
    """A YAML document's top map, with its interpolations as they are written.

    Raises:
        BadInputError: it is no such document, or stands for more than a job can be.
    """
    if len(data) > MOST_BYTES:
        raise BadInputError(f"{source} is larger than a job file can be (1 MiB)", role=_ROLE)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadInputError(f"{source} is not UTF-8 text: line {line}", role=_ROLE) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            what = "empty" if node is None else "a list" if isinstance(node, yaml.SequenceNode) else "plain text"
            raise BadInputError(f"{source} is {what}, but must be a map of sections (name, model, ...)", role=_ROLE)
        if fault := fault_of_node(node):
            raise BadInputError(f"{source}: {fault}", role=_ROLE)
        config = OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source} line {mark.line + 1}" if mark else source
        reason = error.problem or error.context
        raise BadInputError(f"{where} is not valid YAML: {reason}", role=_ROLE) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date that is none
        raise BadInputError(f"{source} is not valid YAML: {str(error).splitlines()[0]}", role=_ROLE) from error
    except RecursionError as error:
        raise BadInputError(f"{source} is nested too deeply", role=_ROLE) from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(f"{source}: {reason}", role=_ROLE) from error
    if not isinstance(config, DictConfig):
        raise BadInputError(f"{source} must be a map of sections", role=_ROLE)
    return config


def _apply(config: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise BadInputError(f"{override!r} is not an override: write key=value", role=_ROLE)
    path = parse_key(key)
    if not suggest.is_known(path):
        known = 0
        while known < len(path) and suggest.is_known(path[: known + 1]):
            known += 1
        wrong = path[: known + 1]
        if known and not suggest.keys_at(path[:known]):
            hint = f"{suggest.dotted(path[:known])!r} has no keys below it"
        else:
            hint = suggest.suggest(wrong)
        raise BadInputError(f"override {override!r}: unknown key {suggest.dotted(wrong)!r}: {hint}", role=_ROLE)
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        value: Any = parsed["value"] if isinstance(parsed, dict) else None
        OmegaConf.update(config, key, value, merge=False)
    except (OmegaConfBaseException, yaml.YAMLError, IndexError, ValueError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise BadInputError(f"override {override!r}: {text}", role=_ROLE) from error


def parse_key(key: str) -> suggest.Path:
    """``rewards[0].weight`` or ``rewards.0.weight`` as a path."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in parts)


def _locate(lines: dict[suggest.Path, int], path: suggest.Path, text: str) -> str:
    """Puts the line of the key in front; keys from overrides have none."""
    return f"line {lines[path]}: {text}" if path in lines else text


def _key_lines(data: bytes) -> dict[suggest.Path, int]:
    """Key path -> line in the file, counted from 1. The file has been read as YAML before."""
    lines: dict[suggest.Path, int] = {}

    def walk(node: yaml.Node | None, path: suggest.Path) -> None:
        if len(path) > 8:
            return
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*path, str(key.value))
                lines[inner] = key.start_mark.line + 1
                walk(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[(*path, index)] = value.start_mark.line + 1
                walk(value, (*path, index))

    walk(yaml.compose(data.decode("utf-8-sig"), Loader=yaml.SafeLoader), ())
    return lines
