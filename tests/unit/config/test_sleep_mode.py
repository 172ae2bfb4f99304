"""``rollout.sleep_mode``: with what it goes together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nightshift.config import JobSpec

JOB: dict[str, Any] = {
    "name": "x",
    "model": {"path": "m"},
    "data": {"train_files": ["t"]},
    "rewards": [{"function": "r.py:f"}],
}


def spec(rollout: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
    return JobSpec.model_validate({**JOB, "rollout": {"sleep_mode": True} | (rollout or {}), **sections})


def test_servers_sleep_in_synchronous_jobs_if_they_are_asked_to() -> None:
    assert spec(pipeline={"max_staleness": 0}).rollout.sleep_mode
    assert not JobSpec.model_validate(JOB).rollout.sleep_mode


@pytest.mark.parametrize("bound", [1, 4, None])
def test_what_is_generated_beside_the_training_needs_a_server_that_is_awake(bound: int | None) -> None:
    with pytest.raises(ValidationError, match=r"nothing can be generated beside it: set pipeline\.max_staleness to 0"):
        spec(pipeline={"max_staleness": bound})


@pytest.mark.parametrize("rollout", [{"url": "http://gpu:8000"}, {"fleet": "night"}])
def test_servers_of_somebody_else_do_not_sleep(rollout: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="started for the job"):
        spec(rollout, pipeline={"max_staleness": 0})


def test_a_job_on_pairs_has_none_that_could() -> None:
    with pytest.raises(ValidationError, match="started for the job"):
        spec(algorithm={"policy_loss": "dpo"}, pipeline={"max_staleness": 0})
