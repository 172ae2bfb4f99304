"""verl's PPO and GRPO configurations as job files, with one line for each key: what became of it, and why.

Two forms are read: the small one of verl's first examples (``actor_rollout``), and the full one of its ``ppo_trainer``
(``actor_rollout_ref``) with Hydra's command-line overrides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nightshift.compat import verl_reward
from nightshift.compat.verl_keys import FULL, SMALL, Rule
from nightshift.config.load import MOST_BYTES, read_yaml
from nightshift.config.plain import fault_of_numbers, fault_of_references
from nightshift.wire.errors import BadInputError

Verdict = Literal["mapped", "defaulted", "not supported"]
_ROLE = "job"
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one key.

    Attributes:
        key: of the verl configuration; empty where a key of the job file was filled in.
        target: key of the job file; empty where there is none.
    """

    key: str
    value: Any
    verdict: Verdict
    target: str
    note: str

    def __str__(self) -> str:
        where = f" -> {self.target}" if self.target else ""
        name = f"{self.key} = {self.value!r}" if self.key else "(left out)"
        return f"{self.verdict:<13}  {name}{where}" + (f": {self.note}" if self.note else "")


@dataclass(slots=True)
class Imported:
    """A job file made of a verl configuration."""

    job: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    #: File name -> content of what has to lie beside the job file.
    files: dict[str, str] = field(default_factory=dict)

    def put(self, target: str, value: Any) -> None:
        """Sets a key of the job."""
        section = self.job
        *path, last = target.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value

    def get(self, target: str) -> Any:
        """A key of the job, or None."""
        value: Any = self.job
        for part in target.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def is_verl(path: Path) -> bool:
    """Whether a file is a verl configuration: it has a section that only those have."""
    try:
        config = _load(path)
    except BadInputError:
        return False
    return "actor_rollout" in config or "actor_rollout_ref" in config


def import_verl(path: Path, overrides: Sequence[str] = ()) -> Imported:
    """Reads a verl configuration.

    Raises:
        BadInputError: the file is no verl configuration, or an override is none.
    """
    values, unresolved = _read(path, overrides)
    full = "actor_rollout_ref" in values
    if not full and "actor_rollout" not in values:
        raise BadInputError(
            f"{path} is no verl configuration: it has no section actor_rollout or actor_rollout_ref", role=_ROLE
        )
    made = Imported()
    rules = FULL if full else SMALL
    flat = _flatten(values)
    for key, value in flat.items():
        rule = rules.get(key) or _wildcard(rules, key)
        if key in unresolved:
            made.lines.append(Line(key, value, "not supported", "", "its interpolation cannot be resolved"))
        else:
            _apply(made, rule, key, value, flat)
    _complete(made, flat, path)
    return made


def _apply(made: Imported, rule: Rule | None, key: str, value: Any, flat: Mapping[str, Any]) -> None:
    if rule is None:
        made.lines.append(Line(key, value, "not supported", "", "nothing here corresponds to it"))
        return
    outcome = rule(value, flat)
    for target, item in outcome.values.items():
        made.put(target, item)
    verdict: Verdict = "mapped" if outcome.values or outcome.same else "not supported"
    made.lines.append(Line(key, value, verdict, ", ".join(outcome.values), outcome.note))


def _wildcard(rules: Mapping[str, Rule], key: str) -> Rule | None:
    """The rule of the nearest section that has one for all its keys."""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if rule := rules.get(".".join(parts[:length]) + ".*"):
            return rule
    return None


def _complete(made: Imported, flat: Mapping[str, Any], path: Path) -> None:
    """Fills in what a job needs and the configuration leaves out."""
    project, experiment = flat.get("trainer.project_name"), flat.get("trainer.experiment_name")
    name = _NAME.sub("-", "-".join(str(part) for part in (project, experiment) if part)) or path.stem
    made.put("name", re.sub(r"\.{2,}", ".", name)[:64].strip("-._") or "verl")
    if made.get("data.train_files") is None:
        raise BadInputError(f"{path} names no data.train_files", role=_ROLE)
    if made.get("model.path") is None:
        raise BadInputError(f"{path} names no model", role=_ROLE)
    if made.get("algorithm.estimator") is None:
        _default(made, "algorithm.estimator", "gae", "verl's default")
    estimator = made.get("algorithm.estimator")
    if estimator in ("gae", "vtrace"):
        if made.get("scorers.critic") is None:
            _default(made, "scorers.critic", {}, f"{estimator} needs a critic; it starts from the policy's model")
    elif made.get("scorers.critic") is not None:
        del made.job["scorers"]["critic"]
        made.lines = [
            Line(line.key, line.value, "not supported", "", f"{estimator} uses no critic, in verl neither")
            if line.key.startswith("critic.")
            else line
            for line in made.lines
        ]
    if made.get("rollout.n") is None:
        grouped = estimator in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
        why = "the estimator compares samples of one prompt" if grouped else "verl's default"
        _default(made, "rollout.n", 4 if grouped else 1, why)
    if made.get("rollout.batch_size") is None:
        _default(made, "rollout.batch_size", 8, "verl's default of 1024 prompts is meant for many GPUs")
    _rewards(made, flat, path)
    ranks, samples = made.get("trainer.ranks") or 1, made.get("rollout.batch_size") * made.get("rollout.n")
    if samples % ranks:
        made.put("trainer.ranks", 1)
        made.lines.append(
            Line("", None, "defaulted", "trainer.ranks", f"1: {ranks} ranks do not divide {samples} samples")
        )


def _rewards(made: Imported, flat: Mapping[str, Any], path: Path) -> None:
    source, function = flat.get("custom_reward_function.path"), flat.get("custom_reward_function.name")
    if source:
        made.files["verl_reward_adapter.py"] = _ADAPTER.format(
            path=str((path.resolve().parent / str(source)).resolve()), name=function or "compute_score"
        )
        made.job["rewards"] = [{"function": "verl_reward_adapter.py:score", "name": "custom"}]
        return
    made.job["rewards"] = [{"function": f"{Path(verl_reward.__file__).resolve()}:score", "name": "answer"}]
    note = (
        "the answer against reward_model.ground_truth, whatever data_source says; verl chooses a scorer by data_source"
    )
    made.lines.append(Line("", None, "defaulted", "rewards", note))


_ADAPTER = '''"""Calls a reward function of verl with the names that verl gives its arguments."""

import importlib.util

_spec = importlib.util.spec_from_file_location("verl_reward_function", {path!r})
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


def score(response, ground_truth=None, data_source=None, extra_info=None):
    result = _module.{name}(
        data_source=data_source, solution_str=response, ground_truth=ground_truth, extra_info=extra_info
    )
    return result
'''


def _default(made: Imported, target: str, value: Any, why: str) -> None:
    made.put(target, value)
    made.lines.append(Line("", None, "defaulted", target, f"{value!r}: {why}"))


# Reading --------------------------------------------------------------------------------------------------------------


def _read(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    config = _load(path)
    for override in overrides:
        _override(config, override)
    if fault := fault_of_references(OmegaConf.to_container(config, resolve=False)):
        raise BadInputError(f"{path}: {fault}", role=_ROLE)
    for key in ("defaults", "hydra", "_target_"):
        config.pop(key, None)
    unresolved: set[str] = set()
    found = _resolve(config, "", unresolved)
    if number := fault_of_numbers(found):
        raise BadInputError(f"{path}: {number[0]!r} {number[1]}", role=_ROLE)
    return found, unresolved


def _load(path: Path) -> DictConfig:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadInputError(f"cannot read {str(path)!r}: {error.strerror}", role=_ROLE) from error
    return read_yaml(data, str(path))


def _override(config: DictConfig, text: str) -> None:
    """One of Hydra's overrides: ``key=value``, ``+key=value``, ``++key=value`` or ``~key``."""
    if text.startswith("~"):
        key = text[1:].partition("=")[0]
        parent, _, last = key.rpartition(".")
        section = OmegaConf.select(config, parent) if parent else config
        if not isinstance(section, DictConfig) or last not in section:
            raise BadInputError(f"override {text!r}: there is no {key!r}", role=_ROLE)
        del section[last]
        return
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not key:
        raise BadInputError(f"{text!r} is not an override: write key=value, +key=value or ~key", role=_ROLE)
    try:
        parsed = OmegaConf.from_dotlist([f"value={value}"])
        OmegaConf.update(config, key, OmegaConf.to_container(parsed, resolve=False)["value"], merge=False)  # type: ignore[index, call-overload]
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise BadInputError(f"override {text!r}: {str(error).splitlines()[0]}", role=_ROLE) from error


def _resolve(config: DictConfig, path: str, unresolved: set[str]) -> dict[str, Any]:
    """Plain values; what cannot be resolved stays as it is written, and its key is noted."""
    found: dict[str, Any] = {}
    written: Any = OmegaConf.to_container(config, resolve=False)
    for raw in config:
        key = str(raw)
        inner = f"{path}.{key}" if path else key
        try:
            value = config[raw]
        except OmegaConfBaseException:
            found[key] = str(written[raw])
            unresolved.add(inner)
            continue
        if isinstance(value, DictConfig):
            found[key] = _resolve(value, inner, unresolved)
        else:
            try:
                found[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException:
                found[key] = OmegaConf.to_container(value, resolve=False)
                unresolved.add(inner)
    return found


def _flatten(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            flat |= _flatten(value, inner)
        elif key != "_target_":
            flat[inner] = value
    return flat
