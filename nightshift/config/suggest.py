"""The right key for a wrong one: misspelt, in the wrong section, or under another project's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from nightshift.config.job import JobSpec

#: Names that other training projects use, and where the same thing is here.
_ALIASES = {
    "lr": "trainer.learning_rate",
    "max_steps": "trainer.total_steps",
    "num_train_epochs": "trainer.total_epochs",
    "kl_beta": "algorithm.kl_coef",
    "beta": "algorithm.kl_coef",
    "advantage_estimator": "algorithm.estimator",
    "adv_estimator": "algorithm.estimator",
    "num_generations": "rollout.n",
    "group_size": "rollout.n",
    "n_samples": "rollout.n",
    "max_tokens": "rollout.max_response_length",
    "max_new_tokens": "rollout.max_response_length",
    "max_completion_length": "rollout.max_response_length",
    "train_batch_size": "rollout.batch_size",
    "model_name_or_path": "model.path",
    "actor_model": "model.path",
    "off_by_n": "pipeline.max_staleness",
}

#: What other projects call the training of a few added weights in place of the model's own.
_ADAPTERS = re.compile(r"(^|[_-])(q?d?lora|peft|adapters?)([_-]|$)|^target_modules$", re.IGNORECASE)

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    """A key path as a user writes it: ``rewards[0].weight``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The section models that an annotation holds, directly, in a union or in a list."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for inner in get_args(annotation) for model in models_of(inner)]


def models_at(path: Path) -> list[type[BaseModel]]:
    """The models that describe the map at ``path``; empty where the path leads to no section."""
    models: list[type[BaseModel]] = [JobSpec]
    for part in path:
        if isinstance(part, int):
            continue
        models = [
            inner
            for model in models
            if part in model.model_fields
            for inner in models_of(model.model_fields[part].annotation)
        ]
    return models


def keys_at(path: Path) -> list[str]:
    """The keys that the map at ``path`` may have."""
    return list(dict.fromkeys(key for model in models_at(path) for key in model.model_fields))


def is_known(path: Path) -> bool:
    """Whether ``path`` names a key of a job file; positions in lists are not checked."""
    names = path if not path or isinstance(path[-1], str) else path[:-1]
    return bool(names) and names[-1] in keys_at(names[:-1])


def describe(path: Path) -> str:
    """The first sentence of a key's description, or an empty text."""
    for model in models_at(path[:-1]):
        field = model.model_fields.get(str(path[-1]))
        if field is not None and field.description:
            return field.description.split("\n\n")[0].replace("\n", " ").rstrip(".")
    return ""


@cache
def _sections() -> dict[str, list[str]]:
    """Key -> the sections that have it, as users write them ("" is the top level)."""

    def walk(path: Path) -> Iterator[tuple[str, str]]:
        for key in keys_at(path):
            yield key, dotted(path)
            if keys_at((*path, key)):
                is_list = key == "rewards"
                yield from walk((*path, key, 0) if is_list else (*path, key))

    found: dict[str, list[str]] = {}
    for key, section in walk(()):
        found.setdefault(key, []).append(section)
    return found


def suggest(path: Path) -> str:
    """What to write instead of the unknown key at ``path``; one sentence without its full stop.

    A key that exists in other sections is sent there; else the nearest key of its own section, then the nearest of all
    sections, and last the list of what its section has.
    """
    section, key = path[:-1], str(path[-1])
    own = keys_at(section)
    sections = _sections()
    if key in sections:
        places = [f"{place}.{key}" if place else key for place in sections[key]]
        return f"{key!r} belongs to another section: {' or '.join(repr(place) for place in places)}"
    if _ADAPTERS.search(key):
        return "adapters (LoRA) are not trained here, the whole model is: leave it out"
    if near := difflib.get_close_matches(key, own, n=1, cutoff=0.6):
        return f"did you mean {dotted((*section, near[0]))!r}?"
    if key in _ALIASES:
        return f"here it is {_ALIASES[key]!r}"
    if near := difflib.get_close_matches(key, list(sections), n=1, cutoff=0.75):
        place = min(sections[near[0]], key=lambda found: found.count("."))
        return f"did you mean {(f'{place}.{near[0]}' if place else near[0])!r}?"
    where = f"section {dotted(section)!r}" if section else "a job file"
    return f"{where} has the keys {', '.join(own)}"
