"""The command of a server that runs elsewhere reach by URL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from nightshift.wire.errors import BadInputError
from services.rollout.serve import command_of


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    path = tmp_path / "job.yaml"
    values = {
        "name": "x",
        "model": {"path": "model"},
        "data": {"train_files": ["x"], "max_prompt_length": 16},
        "rewards": [{"function": "x.py:f"}],
        "resources": {"device": "cpu", "rollout_cores": [0]},
    }
    path.write_text(yaml.safe_dump(values))
    return path


ENVIRONMENT = {"NIGHTSHIFT_ROLLOUT_TOKEN": "t", "NIGHTSHIFT_WEIGHT_URL": "http://trainer:8713", "HOME": "/x"}


def test_it_is_the_launchers_command_under_another_address(job: Path) -> None:
    more = {"NIGHTSHIFT_WEIGHT_CACHE": "/cache", "NIGHTSHIFT_REQUEST_LOG": "/log"}
    command = command_of(job, ["rollout.max_num_seqs=3"], "0.0.0.0", 8123, ENVIRONMENT | more)
    pairs = dict(zip(command.argv, command.argv[1:], strict=False))
    assert (pairs["--host"], pairs["--port"], pairs["--max-num-seqs"]) == ("0.0.0.0", "8123", "3")
    assert pairs["--model"] == str(job.parent / "model")
    assert json.loads(pairs["--weight-transfer-config"]) == {"backend": "safetensors"}
    for name, value in (ENVIRONMENT | more).items():
        assert command.env[name] == value
    assert "NIGHTSHIFT_WEIGHT_STORE" not in command.env
    assert (
        command.env["NIGHTSHIFT_INCARNATION"] != command_of(job, [], "a", 1, ENVIRONMENT).env["NIGHTSHIFT_INCARNATION"]
    )


def test_a_server_that_is_sent_its_weights_needs_no_place_to_fetch_them_from(job: Path) -> None:
    command = command_of(job, ["rollout.weight_transfer=nccl"], "0.0.0.0", 1, {"NIGHTSHIFT_ROLLOUT_TOKEN": "t"})
    pairs = dict(zip(command.argv, command.argv[1:], strict=False))
    assert json.loads(pairs["--weight-transfer-config"]) == {"backend": "nccl"}
    assert "NIGHTSHIFT_WEIGHT_URL" not in command.env


@pytest.mark.parametrize("name", ["NIGHTSHIFT_ROLLOUT_TOKEN", "NIGHTSHIFT_WEIGHT_URL"])
def test_it_does_not_start_without_a_token_or_a_place_for_weights(job: Path, name: str) -> None:
    with pytest.raises(BadInputError, match=name):
        command_of(job, [], "0.0.0.0", 1, {**ENVIRONMENT, name: ""})


def test_a_model_that_is_not_there_is_named(job: Path) -> None:
    with pytest.raises(BadInputError, match="nowhere"):
        command_of(job, ["model.path=./nowhere"], "0.0.0.0", 1, ENVIRONMENT)
