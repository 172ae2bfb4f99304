"""``nightshift.Trainer``, embedded and against a service: the real client, service and runner between fake services."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift import Trainer
from nightshift.analysis.audit import audit
from nightshift.analysis.evidence import load
from nightshift.config.live import SettingsError
from nightshift.trainer import Loss, RolloutBatch
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError
from tests.fakes.service import ROOT
from tests.fakes.up import Up
from tests.fixtures.tokenizer_k import write_folder

COMMAND = [sys.executable, "-m", "tests.fakes.session_process", "{folder}"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text("def wanted(response):\n    return 0.0\n")
    return write_folder(tmp_path / "model")


@pytest.fixture(params=["embedded", "remote"])
def make(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Trainer]]:
    """Makes a trainer: with a service of its own, or one that is there."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made: list[Trainer] = []
    up = Up(tmp_path / "data", "--allow-path", str(tmp_path), command=COMMAND) if request.param == "remote" else None
    if up is not None:
        up.__enter__()

    def trainer(**config: Any) -> Trainer:
        where: dict[str, Any] = {"service_command": ["--command", json.dumps(COMMAND)]}
        if up is not None:
            where = {"url": up.url, "token": (up.folder / "admin-token").read_text().strip()}
        sections = {
            "data": {"max_prompt_length": 64},
            "rollout": {"n": 2, "max_response_length": 8},
            "trainer": {"learning_rate": 2.0},
            "scorers": {"batch_wait_ms": 1.0},
            "tracking": {"tensorboard": False},
        }
        for section, values in config.items():
            sections[section] = sections.get(section, {}) | values
        found = Trainer(
            actor_model=str(model), reward_model=f"{tmp_path / 'reward.py'}:wanted", config=sections, **where
        )
        made.append(found)
        return found

    yield trainer
    for found in made:
        found.close()
    if up is not None:
        up.__exit__(None, None, None)


def batches(count: int, size: int = 3) -> list[list[dict[str, Any]]]:
    return [[{"prompt": f"word {size * at + row}?", "ground_truth": "0"} for row in range(size)] for at in range(count)]


def test_a_loop_of_ones_own(make: Callable[..., Trainer], tmp_path: Path) -> None:
    """The snippet of the design, and what it leaves behind."""
    trainer = make()
    assert trainer.supported_parallelisms() == ["data"]
    trainer.config.rollout_batch_size = 4
    assert trainer.config.rollout_batch_size == 4
    assert trainer.config.use_async_rollout is True
    losses: list[Loss] = []
    for at, batch in enumerate(batches(3)):
        outputs = trainer.rollout(batch)
        assert isinstance(outputs, RolloutBatch)
        assert len(outputs) == 6
        loss = trainer.compute_loss(outputs)
        before = float(loss)
        assert not loss.stepped
        metrics = trainer.step(loss)
        assert float(loss) == metrics["loss/actor"] == before, "no weights changed in between"
        assert metrics["samples"] == 6
        losses.append(loss)
        if at == 0:
            trainer.config.learning_rate = 0.5
    first = losses[0].batch[0]
    assert (first.prompt_length, first.tokens_generated) == (len(first.prompt_ids), len(first.response_ids))
    assert first.logprobs.dtype == np.float32
    assert first.reward is not None
    assert first.reward_latency >= 0
    assert len(first.trace_id) == 32
    assert losses[2].batch[0].weight_versions[0].endswith("/2")
    assert losses[1].metrics["lr"] == 0.5
    assert np.isfinite(losses[0].batch.rewards).all()
    with pytest.raises(RoleError, match="stepped or discarded before"):
        trainer.step(losses[0])
    # The service follows a run by its events, so its view may come a moment later.
    deadline = time.monotonic() + 30
    while (job := trainer.job) is not None and job.step < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert job is not None
    assert (job.state, job.step) == ("running", 3)
    folder = trainer.save(tmp_path / "out")
    assert (folder / "config.json").exists()
    ended = trainer.job
    assert ended is not None
    assert ended.state == "succeeded"
    for checkpoints in tmp_path.rglob("checkpoints"):
        found = audit(load(checkpoints.parent))
        assert found.balanced, found.findings
        assert (found.step, found.accounts["trained"], found.samples) == (3, 9, 18)


def test_a_loss_that_is_passed_over_is_discarded(make: Callable[..., Trainer]) -> None:
    trainer = make()
    one, two, three = (trainer.rollout(batch) for batch in batches(3, 2))
    trainer.step(trainer.compute_loss(two))
    with pytest.raises(RoleError, match="stepped or discarded before"):
        trainer.step(trainer.compute_loss(one))
    with pytest.raises(RoleError, match="stepped or discarded before"):
        float(trainer.compute_loss(one))
    trainer.step(trainer.compute_loss(three))
    job, client = trainer.job, trainer._client
    assert job is not None
    assert client is not None
    ledger = client.ledger(job.id)
    assert (ledger["issued"], ledger["trained"], ledger["cancelled"], ledger["balanced"]) == (6, 4, 2, True)


def test_the_next_batch_is_already_running(make: Callable[..., Trainer]) -> None:
    """The loop of the design, word for word."""
    trainer = make()
    versions = []
    dataloader = trainer.dataloader(batches(4, 2))
    for batch in dataloader:
        outputs = trainer.rollout(batch)
        loss = trainer.compute_loss(outputs)
        trainer.step(loss)
        versions.append({int(version.rsplit("/", 1)[-1]) for output in outputs for version in output.weight_versions})
    assert [min(found) for found in versions] == [0, 0, 1, 2], "one step behind, from the second batch on"


def test_wrong_batches_and_settings_say_what_is_right(make: Callable[..., Trainer]) -> None:
    trainer = make()
    with pytest.raises(BadInputError, match="rows with a prompt"):
        trainer.rollout([{"question": "x"}])
    with pytest.raises(BadInputError, match="one length"):
        trainer.rollout({"prompt": ["a", "b"], "ground_truth": ["a"]})
    with pytest.raises(SettingsError, match="model_size: cannot change"):
        trainer.config.model_size = "1b"
    with pytest.raises(NightshiftError, match=r"Call trainer\.rollout"):
        trainer.save("x")
    outputs = trainer.rollout({"prompt": ["a?", "b?"], "ground_truth": ["0", "0"]})
    assert len(outputs) == 4
    with pytest.raises(RoleError, match="rows"):
        trainer.rollout([{"prompt": "long " * 200}])
    assert len(trainer.rollout(batches(1)[0])) == 6, "a wrong batch takes nothing down"


def test_debug_mode_records_each_boundary_from_the_next_step_on(make: Callable[..., Trainer]) -> None:
    trainer = make()
    assert trainer.debug_mode is False
    one, two, three = batches(3, 2)
    trainer.step(trainer.compute_loss(trainer.rollout(one)))
    assert trainer.tensors() == []
    trainer.debug_mode = True
    outputs = trainer.rollout(two)
    trainer.step(trainer.compute_loss(outputs))
    assert trainer.debug_mode is True
    found = {(item["role"], item["name"]): item for item in trainer.tensors(2)}
    assert found["rollout", "response_ids"]["dtype"] == "int32"
    assert found["rollout", "logprobs"]["device"] == "cpu"
    lengths = [str([len(output.response_ids)]) for output in outputs]
    assert found["rollout", "logprobs"]["shapes"] == {length: lengths.count(length) for length in set(lengths)}
    assert found["advantages", "advantages"]["shapes"] == found["rollout", "logprobs"]["shapes"]
    assert found["reward", "reward"]["shapes"] == {"[]": len(outputs)}
    assert found["trainer", "logprobs"]["dtype"] == "float32", "what the trainer says of its own"
    assert {item["step"] for item in trainer.tensors()} == {2}
    trainer.debug_mode = False
    trainer.step(trainer.compute_loss(trainer.rollout(three)))
    assert trainer.tensors(3) == []


def test_what_a_trainer_refuses_says_so_at_once(tmp_path: Path) -> None:
    reward = f"{tmp_path / 'reward.py'}:wanted"
    with pytest.raises(BadInputError, match=r"actor_model is 'http://host:1'.*must be at hand"):
        Trainer(actor_model="http://host:1", reward_model=reward)
    with pytest.raises(BadInputError, match=r"critic_model is 'grpc://host:1'"):
        Trainer(actor_model="x", critic_model="grpc://host:1", reward_model=reward)
    with pytest.raises(BadInputError, match=r"rollout\.n"):
        Trainer(actor_model="x", reward_model=reward, config={"rollout": {"n": 0}})
    with pytest.raises(BadInputError, match="learning_rates"):
        Trainer(actor_model="x", reward_model=reward, config={"trainer": {"learning_rates": 1.0}})


def test_fit_runs_the_whole_loop(make: Callable[..., Trainer], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for batch in batches(4) for row in batch))
    trainer = make()
    trainer.config.rollout_batch_size = 2
    with pytest.raises(BadInputError, match="no file of them is named"):
        trainer.fit(total_steps=3)
    trainer = make(data={"train_files": [str(path)]})
    trainer.config.rollout_batch_size = 2
    done = trainer.fit(total_steps=3)
    assert (done.state, done.step) == ("succeeded", 3)
    with pytest.raises(BadInputError, match="reward_model"):
        Trainer(actor_model="x")
