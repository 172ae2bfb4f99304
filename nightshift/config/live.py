"""Live settings: which keys of a job can change while it runs, and what a change may be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from nightshift.config.job import JobSpec
from nightshift.config.messages import explain_all
from nightshift.config.plain import fault_of_numbers
from nightshift.config.suggest import dotted, suggest
from nightshift.wire.errors import BadInputError

_NEXT = "from the next step on"
#: Keys that can change -> when a change takes effect.
LIVE = {
    "rollout.batch_size": "from the next batch on",
    "rollout.temperature": "once the groups in flight are trained; a checkpoint is written then",
    "pipeline.max_staleness": "from the next step on; what a smaller bound makes too old is dropped",
    "pipeline.on_stale": _NEXT,
    "algorithm.kl_coef": _NEXT,
    "algorithm.clip_low": _NEXT,
    "algorithm.clip_high": _NEXT,
    "algorithm.entropy_coef": _NEXT,
    "algorithm.gamma": _NEXT,
    "algorithm.gae_lambda": _NEXT,
    "trainer.learning_rate": _NEXT,
    "trainer.save_freq": _NEXT,
    "trainer.test_freq": _NEXT,
    "tracking.debug_mode": _NEXT,
}
#: Keys whose change has to wait until nothing that was generated under the old value is in flight.
DRAINED = frozenset({"rollout.temperature"})
#: Names of the Python API -> keys.
ALIASES = {
    "rollout_batch_size": "rollout.batch_size",
    "batch_size": "rollout.batch_size",
    "learning_rate": "trainer.learning_rate",
    "kl_coef": "algorithm.kl_coef",
    "gamma": "algorithm.gamma",
    "gae_lambda": "algorithm.gae_lambda",
    "temperature": "rollout.temperature",
    "max_staleness": "pipeline.max_staleness",
    "save_freq": "trainer.save_freq",
    "test_freq": "trainer.test_freq",
    "debug_mode": "tracking.debug_mode",
}
ASYNC = "use_async_rollout"
#: Why other keys cannot change, by the beginning of the key; the longest that fits counts.
_FIXED = {
    "": "the job's processes are told at their start",
    "name": "the run's folder and its policy versions carry it",
    "model": "the optimiser's state and the servers' memory belong to this model: submit a job with another one",
    "data": "the prompts were measured and put in order at the start: submit another job",
    "rewards": "the scorers' processes load them at their start: submit another job",
    "algorithm.estimator": "groups in flight were drawn for this estimator, and the roles were started for it",
    "algorithm.policy_loss": "the roles were started for it",
    "rollout.n": "groups in flight have as many samples as they began with",
    "rollout.max_response_length": "the servers' context and memory are laid out for it",
    "pipeline.deterministic": "it is a promise about the whole run",
    "trainer.total_steps": "the learning rate's schedule and the admission of prompts end with it",
    "trainer.total_epochs": "the learning rate's schedule and the admission of prompts end with it",
    "trainer.ranks": "the ranks hold shards of the optimiser's state",
    "trainer.zero_stage": "the ranks hold shards of the optimiser's state",
    "scorers.critic": "the critic's ranks are told at their start",
    "resources": "devices, cores and ports are taken at the start",
}


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """A key with its present value, whether it can change, and when or why not."""

    key: str
    value: Any
    live: bool
    why: str


def why_fixed(key: str) -> str:
    """Why a key cannot change while the job runs."""
    parts = key.split(".")
    for length in range(len(parts), -1, -1):
        if reason := _FIXED.get(".".join(parts[:length])):
            return reason
    return _FIXED[""]


def get(spec: JobSpec, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = spec
    for part in key.split("."):
        value = getattr(value, part)
    return value


def put(spec: JobSpec, key: str, value: Any) -> None:
    """Sets a dotted key; the section checks the value alone."""
    section, _, last = key.rpartition(".")
    setattr(get(spec, section) if section else spec, last, value)


def settings_of(spec: JobSpec) -> list[LiveSetting]:
    """The settings of a job that are worth showing: the live ones, and a few that look as if they were."""
    fixed = ("model.path", "rollout.n", "rollout.max_response_length", "algorithm.estimator", "trainer.total_steps")
    return [LiveSetting(key, get(spec, key), True, why) for key, why in LIVE.items()] + [
        LiveSetting(key, get(spec, key), False, why_fixed(key)) for key in fixed
    ]


def check_changes(spec: JobSpec, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes under the keys of a job file, with values as the job holds them.

    Args:
        spec: the job with the values that are in force.
        changes: by key or by the Python API's name.

    Raises:
        SettingsError: a key cannot change or a value is wrong; nothing may be changed then.
    """
    problems: list[tuple[str, str]] = []
    wanted: dict[str, Any] = {}
    for name, value in changes.items():
        if number := fault_of_numbers(value):
            problems.append((name, number[1]))
            continue
        if name == ASYNC:
            _asynchronous(spec, value, wanted, problems)
            continue
        key = ALIASES.get(name, name)
        if key in LIVE:
            wanted[key] = value
        elif name == "model_size":
            problems.append((name, f"cannot change while the job runs: {why_fixed('model')}"))
        elif _exists(spec, key) or key in _FIXED:
            problems.append((name, f"cannot change while the job runs: {why_fixed(key)}"))
        else:
            problems.append((name, f"is no setting: {suggest(tuple(key.split('.')))}"))
    if wanted.get("algorithm.kl_coef") and not spec.needs_reference:
        problems.append(("algorithm.kl_coef", "cannot become positive: the job runs without a reference model"))
    if problems:
        raise SettingsError(problems)
    changed = spec.model_dump(mode="json")
    for key, value in wanted.items():
        section, _, last = key.partition(".")
        changed[section][last] = value
    try:
        checked = JobSpec.model_validate(changed)
    except ValidationError as errors:
        raise SettingsError([(dotted(path), text) for path, text in explain_all(errors)]) from errors
    return {key: get(checked, key) for key in wanted}


class SettingsError(BadInputError):
    """Settings that cannot change, or values that are wrong.

    Attributes:
        problems: field and sentence of each.
    """

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        field, text = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        message = f"{field}: {text}" if field and field not in text else text
        super().__init__(f"{message}{more}", role="job")
        self.problems = problems


def _asynchronous(spec: JobSpec, value: Any, wanted: dict[str, Any], problems: list[tuple[str, str]]) -> None:
    if not isinstance(value, bool):
        problems.append((ASYNC, "must be true or false"))
    elif not value:
        wanted["pipeline.max_staleness"] = 0
    elif spec.pipeline.max_staleness == 0:
        wanted["pipeline.max_staleness"] = 1


def _exists(spec: JobSpec, key: str) -> bool:
    try:
        get(spec, key)
    except AttributeError:
        return False
    return True
