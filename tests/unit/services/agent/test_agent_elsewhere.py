"""To whom the tokens of an installation go."""

from __future__ import annotations

import pytest

from nightshift.config.job import JobSpec
from nightshift.config.site import ROLLOUT
from orchestrator.jobs.submission import check_hosts
from services.agent.elsewhere import external_server


@pytest.mark.parametrize(
    ("listed", "url", "token"),
    [
        ("", "http://mine:8000", "t"),
        ("http://a:1 http://b:1", "http://b:1", "t"),
        ("http://a:1 http://b:1", "http://elsewhere:1", ""),
    ],
)
def test_the_token_goes_to_the_installations_servers_alone(listed: str, url: str, token: str) -> None:
    environment = {"NIGHTSHIFT_ROLLOUT_TOKEN": "t", ROLLOUT: listed}
    assert external_server(0, url, environment)["token"] == token


def test_a_submission_names_no_agents() -> None:
    job = {
        "name": "x",
        "model": {"path": "/m"},
        "data": {"train_files": ["x"]},
        "rewards": [{"function": "x.py:f"}],
        "rollout": {"url": "http://a:1"},
    }
    assert check_hosts(JobSpec.model_validate(job)) == []
    for role in ("trainer", "scorers"):
        spec = JobSpec.model_validate({**job, "resources": {"agents": {role: "http://elsewhere:1"}}})
        ((field, text),) = check_hosts(spec)
        assert field == f"resources.agents.{role}"
        assert "belongs to the installation" in text
