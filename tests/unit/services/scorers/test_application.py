"""Scorers as applications of a Serve configuration: built from a job file, refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nightshift.wire.errors import BadInputError
from services.scorers import application

REWARD = "def first(response):\n    return 1.0\n\n\ndef second(response):\n    return 0.0\n"


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    values = {
        "name": "x",
        "model": {"path": str(model)},
        "data": {"train_files": ["rows.jsonl"], "max_prompt_length": 8},
        "rewards": [{"function": "reward.py:first"}, {"function": "reward.py:second", "name": "other"}],
        "rollout": {"batch_size": 1, "n": 2, "max_response_length": 8},
        "resources": {"device": "cpu"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_a_reward_is_built_from_the_job_file(job: str) -> None:
    first, other = application.reward({"job": job}), application.reward({"job": job, "name": "other"})
    functions = [str(app._bound_deployment.init_args[0]).rpartition(":")[2] for app in (first, other)]
    assert functions == ["first", "second"]


def test_a_reward_that_the_job_lacks_is_named(job: str) -> None:
    with pytest.raises(BadInputError, match=r"no reward function 'third'\. It has: first, other"):
        application.reward({"job": job, "name": "third"})


def test_the_reference_is_built_where_its_model_is(job: str) -> None:
    built = application.reference({"job": job})
    assert built._bound_deployment.init_args[0] == str(Path(job).parent / "model")
    (Path(job).parent / "model/config.json").unlink()
    with pytest.raises(BadInputError, match="there is no model in"):
        application.reference({"job": job})


def test_args_without_a_job_file_are_refused() -> None:
    with pytest.raises(BadInputError, match="lack 'job'"):
        application.reward({})
