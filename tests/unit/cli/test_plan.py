"""Plans: what a job needs, from the model's description alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from nightshift.cli.estimate import estimate, kv_tokens, read_header, read_shape
from nightshift.cli.main import main
from nightshift.cli.plan import local_model
from nightshift.config import JobSpec
from nightshift.wire.errors import BadInputError

CONFIG = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def write_safetensors(path: Path, shapes: dict[str, list[int]], dtype: str = "F32") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    header |= {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model-1.safetensors", {"a": [1000, 1000], "b": []})
    write_safetensors(folder / "model-2.safetensors", {"c": [10]})
    return folder


def spec(**sections: Any) -> JobSpec:
    base = {
        "name": "a",
        "model": {"path": "m"},
        "data": {"train_files": ["x"], "max_prompt_length": 64},
        "rewards": [{"function": "a.py:f"}],
        "rollout": {"max_response_length": 64},
    }
    return JobSpec.model_validate({**base, **sections})


def test_shape_is_read_without_the_weights(model: Path) -> None:
    shape = read_shape(model)
    assert (shape.parameters, shape.layers, shape.kv_width, shape.dtype) == (1_000_011, 2, 8, "float32")
    assert kv_tokens(spec(), shape) == (1 << 30) // (2 * 2 * 8 * 4)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"])
def test_spoilt_weights_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"model\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_spoilt_config_is_refused_by_name(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(BadInputError, match=r"config\.json"):
        read_shape(model)


def test_memory_follows_the_job(model: Path) -> None:
    shape = read_shape(model)

    def total(role: str, **sections: Any) -> int:
        return {part.role: part.bytes for part in estimate(spec(**sections), shape)}.get(role, 0)

    assert total("reference") == 0
    assert total("reference", algorithm={"kl_coef": 0.1}) > 0
    remote = {"reference": {"model": "grpc://host:1"}}
    assert total("reference", algorithm={"kl_coef": 0.1}, scorers=remote) == 0
    assert total("rollout", rollout={"url": "http://host"}) == 0
    assert total("rollout", rollout={"kv_cache_gib": 2}) - total("rollout") == 1 << 30
    assert total("critic") == total("teacher") == 0
    critic = {"critic": {}}
    assert total("critic", algorithm={"estimator": "gae"}, scorers=critic) > total("trainer") / 2
    taught = {"algorithm": {"estimator": "distillation"}, "scorers": {"teacher": {"model": "t"}}}
    assert total("teacher", **taught) > 0
    assert total("rollout", algorithm={"policy_loss": "dpo"}) == 0
    one, two = (total("trainer", trainer={"ranks": ranks, "zero_stage": 3}) for ranks in (1, 2))
    replicated = total("trainer", trainer={"ranks": 2, "zero_stage": 0})
    assert one < two < replicated


def test_models_are_looked_up_where_they_may_be(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert local_model("builtin:smollm2-135m-instruct") is None
    assert local_model("organisation/name") is None
    made = tmp_path / "cache" / "models" / "smollm2-135m-instruct-bf16"
    fetched = tmp_path / "hub" / "models--organisation--name" / "snapshots" / "abc"
    for folder in (made, fetched):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert local_model("builtin:smollm2-135m-instruct") == made
    assert local_model("organisation/name") == fetched
    assert local_model(str(model)) == model


def test_plan_of_a_model_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "reward.py").write_text("def score(response): return 1.0\n")
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: a\nmodel: {path: organisation/name}\ndata: {train_files: [train.jsonl]}\n"
        "rewards: [{function: reward.py:score}]\n"
    )
    assert main(["plan", str(path)]) == 0
    assert "not on this machine yet" in capsys.readouterr().out
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] is None
