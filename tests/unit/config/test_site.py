"""Roles on other hosts: what a job says of them, what its installation says, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nightshift.config.job import JobSpec
from nightshift.config.site import OTLP, ROLLOUT, SCORERS, TRAINER, WEIGHTS, with_site
from nightshift.transfer import weight_transfer
from nightshift.wire.errors import BadInputError


def job(**sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "t",
            "model": {"path": "/m"},
            "data": {"train_files": ["a"]},
            "rewards": [{"function": "r.py:f"}],
            **sections,
        }
    )


SITE = {TRAINER: "http://trainer:8710", SCORERS: "http://scorers:8710", ROLLOUT: "http://a:8000 http://b:8000"}


def test_an_installation_names_the_hosts_that_a_job_leaves_open() -> None:
    spec = with_site(job(), SITE | {OTLP: "orchestrator"})
    assert (spec.resources.agents.trainer, spec.resources.agents.scorers) == (SITE[TRAINER], SITE[SCORERS])
    assert spec.rollout.urls == ["http://a:8000", "http://b:8000"]
    assert spec.resources.otlp_host == "orchestrator"
    assert weight_transfer(spec, "cpu") == "http"


def test_an_installation_says_where_servers_fetch_weights() -> None:
    site = {ROLLOUT: "http://a:8000", WEIGHTS: "orchestrator:8701"}
    spec = with_site(job(), site)
    assert (spec.resources.weight_host, spec.resources.ports.weights) == ("orchestrator", 8701)
    own = job(resources={"weight_host": "mine", "ports": {"weights": 1}})
    assert with_site(own, site).resources.weight_host == "mine"
    assert with_site(job(), SITE | site).resources.ports.weights == 0, "the trainer's host serves them"
    with pytest.raises(BadInputError, match="does not fit this installation"):
        with_site(job(), {WEIGHTS: "orchestrator"})


def test_what_the_job_says_itself_stays() -> None:
    own = job(
        rollout={"url": "http://mine:1"},
        resources={"agents": {"trainer": "http://mine:2"}, "otlp_host": "127.0.0.1"},
    )
    spec = with_site(own, SITE | {OTLP: "orchestrator"})
    assert spec.rollout.urls == ["http://mine:1"]
    assert (spec.resources.agents.trainer, spec.resources.agents.scorers) == ("http://mine:2", SITE[SCORERS])
    assert spec.resources.otlp_host == "127.0.0.1"
    assert with_site(own, {}) is own


def test_a_trainer_elsewhere_needs_servers_that_can_fetch_its_weights() -> None:
    with pytest.raises(ValidationError, match=r"give rollout\.url"):
        job(resources={"agents": {"trainer": "http://trainer:1"}})
    with pytest.raises(ValidationError, match="does not leave the trainer's host"):
        job(
            resources={"agents": {"trainer": "http://trainer:1"}},
            rollout={"url": "http://a:1", "weight_transfer": "shared_memory"},
        )
    with pytest.raises(BadInputError, match=r"give rollout\.url"):
        with_site(job(), {TRAINER: "http://trainer:1"})
    with pytest.raises(BadInputError, match="does not fit this installation"):
        with_site(job(), SITE | {TRAINER: "trainer"})


def test_a_critic_stays_with_its_trainer() -> None:
    critic = {"scorers": {"critic": {}}, "algorithm": {"estimator": "gae"}, "rollout": {"url": "http://a:1"}}
    with pytest.raises(ValidationError, match=r"must be the same with scorers\.critic"):
        job(resources={"agents": {"trainer": "http://trainer:1"}}, **critic)
    both = {"trainer": "http://trainer:1", "scorers": "http://trainer:1"}
    assert job(resources={"agents": both}, **critic).resources.agents.scorers
