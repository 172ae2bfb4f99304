"""Which settings can change while a job runs."""

from __future__ import annotations

from typing import Any

import pytest

from nightshift.config import JobSpec
from nightshift.config.live import ALIASES, DRAINED, LIVE, SettingsError, check_changes, get, put, settings_of
from nightshift.config.suggest import is_known


def spec(**sections: Any) -> JobSpec:
    job = {"name": "x", "model": {"path": "m"}, "data": {"train_files": ["t"]}, "rewards": [{"function": "r.py:f"}]}
    return JobSpec.model_validate(job | sections)


def test_every_live_key_is_a_key_of_a_job() -> None:
    assert all(is_known(tuple(key.split("."))) for key in LIVE)
    assert set(ALIASES.values()) | DRAINED <= set(LIVE)
    shown = settings_of(spec())
    assert {item.key for item in shown if item.live} == set(LIVE)
    assert all(item.why for item in shown)


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"rollout_batch_size": 32}, "rollout.batch_size", 32),
        ({"rollout.batch_size": "32"}, "rollout.batch_size", 32),
        ({"gae_lambda": 0.9}, "algorithm.gae_lambda", 0.9),
        ({"use_async_rollout": False}, "pipeline.max_staleness", 0),
        ({"pipeline.max_staleness": None}, "pipeline.max_staleness", None),
        ({"learning_rate": 1e-5}, "trainer.learning_rate", 1e-5),
        ({"debug_mode": True}, "tracking.debug_mode", True),
    ],
)
def test_changes_by_either_name(change: dict[str, Any], key: str, value: Any) -> None:
    before = spec()
    assert check_changes(before, change) == {key: value}
    put(before, key, value)
    assert get(before, key) == value


def test_asynchronous_on_is_one_step_ahead_where_it_was_off() -> None:
    assert check_changes(spec(pipeline={"max_staleness": 0}), {"use_async_rollout": True}) == {
        "pipeline.max_staleness": 1
    }
    assert check_changes(spec(pipeline={"max_staleness": 3}), {"use_async_rollout": True}) == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_size": "1b"}, "cannot change while the job runs: the optimiser's state"),
        ({"rollout.n": 8}, "as many samples as they began with"),
        ({"trainer.ranks": 2}, "shards of the optimiser's state"),
        ({"resources.device": "cuda"}, "taken at the start"),
        ({"debug_mode": "loud"}, "debug_mode"),
        ({"learning_rat": 1}, "is no setting: did you mean 'trainer.learning_rate'"),
        ({"nonsense": 1}, "is no setting"),
        ({"rollout.batch_size": 0}, "rollout.batch_size"),
        ({"trainer.learning_rate": "fast"}, "must be a number"),
        ({"use_async_rollout": "yes"}, "true or false"),
        ({"kl_coef": 0.1}, "without a reference"),
        ({"rollout_batch_size": True}, "not true or false"),
    ],
)
def test_what_cannot_change_says_why(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        check_changes(spec(), change | {"gamma": 0.5})
    assert caught.value.problems


def test_values_are_checked_together() -> None:
    with pytest.raises(SettingsError, match=r"trainer\.ranks do not divide"):
        check_changes(spec(trainer={"ranks": 4}, rollout={"n": 2}), {"rollout.batch_size": 3})
    with pytest.raises(SettingsError, match="deterministic"):
        check_changes(spec(pipeline={"max_staleness": 0, "deterministic": True}), {"use_async_rollout": True})
    asleep = spec(pipeline={"max_staleness": 0}, rollout={"sleep_mode": True})
    with pytest.raises(SettingsError, match=r"rollout\.sleep_mode"):
        check_changes(asleep, {"use_async_rollout": True})
