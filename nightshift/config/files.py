"""The files that a job names: made absolute, and checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from nightshift.config.functions import (
    FUNCTION_ARGUMENTS,
    check_function,
    check_reference,
    check_reward_parameters,
    find_source,
    is_reference,
    required_parameters,
    split_reference,
)
from nightshift.config.job import JobSpec
from nightshift.config.rewards import ClassifierReward, CodeReward, EmbeddingReward, JudgeReward, PythonReward

#: Chat templates that come with nightshift.data, by name.
CHAT_TEMPLATES = frozenset({"chatml", "qwen", "llama3", "phi3"})


def is_remote(text: str) -> bool:
    """Whether the text is a URL or a ``builtin:`` name, which stays as it is."""
    return "://" in text or text.startswith("builtin:")


def absolute(text: str, base: Path) -> str:
    """A path relative to ``base`` as an absolute one; URLs and ``builtin:`` names stay as they are."""
    return text if is_remote(text) else str((base / Path(text).expanduser()).resolve())


def resolve_files(spec: JobSpec, base: Path, *, check: bool = True) -> list[str]:
    """Makes the paths of ``spec`` absolute in place.

    Args:
        base: the job file's folder.
        check: whether the files must exist.

    Returns:
        One sentence without its full stop for each file that is missing or wrong.
    """
    problems: list[str] = []
    for key in ("train_files", "test_files"):
        files = [absolute(text, base) for text in getattr(spec.data, key)]
        setattr(spec.data, key, files)
        problems += [f"data.{key}: no file {text!r}" for text in files if not is_remote(text) and not _exists(text)]
    template = spec.data.chat_template
    if template is not None and template not in CHAT_TEMPLATES:
        spec.data.chat_template = absolute(template, base)
        if not Path(spec.data.chat_template).is_file():
            names = ", ".join(sorted(CHAT_TEMPLATES))
            problems.append(f"data.chat_template: no file {spec.data.chat_template!r}, and not one of {names}")
    spec.model.path = _model(spec.model.path, base, "model.path", problems)
    if spec.model.tokenizer is not None:
        spec.model.tokenizer = _model(spec.model.tokenizer, base, "model.tokenizer", problems)
    if spec.scorers.reference.model is not None:
        spec.scorers.reference.model = _model(spec.scorers.reference.model, base, "scorers.reference.model", problems)
    for role in ("teacher", "critic"):
        section = getattr(spec.scorers, role)
        if section is not None and section.model is not None:
            section.model = _model(section.model, base, f"scorers.{role}.model", problems)
    for index, reward in enumerate(spec.rewards):
        if isinstance(reward, PythonReward):
            reward.function = _function(reward.function, base, f"rewards[{index}].function", problems)
        elif isinstance(reward, ClassifierReward | EmbeddingReward):
            reward.model = _model(reward.model, base, f"rewards[{index}].model", problems)
    for section, name in ((spec.data, "curriculum"), (spec.algorithm, "policy_loss"), (spec.algorithm, "estimator")):
        text = getattr(section, name)
        key = f"{'data' if section is spec.data else 'algorithm'}.{name}"
        if text is not None and (key == "data.curriculum" or is_reference(text)):
            setattr(section, name, _custom(text, base, key, problems))
    spec.resources.runs_dir = absolute(spec.resources.runs_dir, Path.cwd())
    spec.resources.weight_store = absolute(spec.resources.weight_store, Path.cwd())
    return problems if check else []


def local_files(spec: JobSpec) -> Iterator[tuple[str, str, Callable[[str], None]]]:
    """Field, path and setter of every file that a job names beside its models: what travels with a submission."""

    def listed(files: list[str], at: int) -> Callable[[str], None]:
        return lambda text: files.__setitem__(at, text)

    def member(owner: object, name: str, suffix: str = "") -> Callable[[str], None]:
        return lambda text: setattr(owner, name, f"{text}{suffix}")

    for key in ("train_files", "test_files"):
        files: list[str] = getattr(spec.data, key)
        for at, text in enumerate(files):
            yield f"data.{key}[{at}]", text, listed(files, at)
    template = spec.data.chat_template
    if template is not None and template not in CHAT_TEMPLATES:
        yield "data.chat_template", template, member(spec.data, "chat_template")
    for at, reward in enumerate(spec.rewards):
        function = getattr(reward, "function", None)
        if isinstance(function, str) and ":" in function:
            path, _, name = function.rpartition(":")
            yield f"rewards[{at}].function", path, member(reward, "function", f":{name}")
    if ":" in spec.algorithm.estimator:
        path, _, name = spec.algorithm.estimator.rpartition(":")
        yield "algorithm.estimator", path, member(spec.algorithm, "estimator", f":{name}")
    if ":" in spec.algorithm.policy_loss:
        path, _, name = spec.algorithm.policy_loss.rpartition(":")
        yield "algorithm.policy_loss", path, member(spec.algorithm, "policy_loss", f":{name}")
    if spec.data.curriculum is not None and ":" in spec.data.curriculum:
        path, _, name = spec.data.curriculum.rpartition(":")
        yield "data.curriculum", path, member(spec.data, "curriculum", f":{name}")


def reward_reads(spec: JobSpec) -> set[str]:
    """What the job's rewards cannot do without: parameters of Python functions without a default, and right answers."""
    needed: set[str] = set()
    for reward in spec.rewards:
        if isinstance(reward, PythonReward):
            path, name = split_reference(reward.function)
            definition = check_function(Path(path), name, allow_async=True)
            needed |= required_parameters(definition) if definition is not None else set()
        elif isinstance(reward, EmbeddingReward | CodeReward) or (
            isinstance(reward, JudgeReward) and "{ground_truth}" in reward.instruction
        ):
            needed.add("ground_truth")
    return needed


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # a name longer than the file system allows
        return False


def _model(text: str, base: Path, key: str, problems: list[str]) -> str:
    """A local folder as an absolute path; an HF id (``name`` or ``organisation/name``) stays as it is."""
    if is_remote(text):
        return text
    path = absolute(text, base)
    if _exists(path):
        return path
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or not text:
        problems.append(f"{key}: no folder {path!r}")
        return path
    return text


def _custom(text: str, base: Path, key: str, problems: list[str]) -> str:
    """A function of the user's with the path absolute; a module's name stays as it is."""
    try:
        path, name = find_source(text)
    except ValueError as error:
        problems.append(f"{key}: {text!r} {error}")
        return text
    if ":" in text:
        path = Path(absolute(str(path), base))
        text = f"{path}:{name}"
        if not _exists(str(path)):
            problems.append(f"{key}: no file {str(path)!r}")
            return text
    try:
        check_reference(path, name, FUNCTION_ARGUMENTS[key])
    except ValueError as error:
        problems.append(f"{key}: {error}")
    return text


def _function(text: str, base: Path, key: str, problems: list[str]) -> str:
    """A reward function with its path absolute."""
    try:
        file, name = split_reference(text)
    except ValueError as error:
        problems.append(f"{key}: {text!r} {error}")
        return text
    path = Path(absolute(file, base))
    if not _exists(str(path)):
        problems.append(f"{key}: no file {str(path)!r}")
        return f"{path}:{name}"
    try:
        definition = check_function(path, name, allow_async=True)
    except ValueError as error:
        problems.append(f"{key}: file {str(path)!r} {error}")
        return f"{path}:{name}"
    if definition is not None:
        try:
            check_reward_parameters(definition)
        except ValueError as error:
            problems.append(f"{key}: function {error}")
    return f"{path}:{name}"
