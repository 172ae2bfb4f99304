"""Real jobs through the service: submitted from a folder that it cannot see, killed, resumed, exported and loaded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from tests.fakes.up import Up
from tests.fixtures.rows import write_parquet
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import leftovers, write_job

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_real_job_through_rest_and_a_killed_service(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    job = write_job(tmp_path / "mine", model, trainer={"total_steps": 6, "save_freq": 2})
    with Up(tmp_path / "data", "--allow-path", str(model), command=None) as up, up.client() as client:
        made = client.submit(job)
        for path in (tmp_path / "mine").glob("*"):
            path.unlink()
        deadline = time.monotonic() + 300
        while client.get(made.id).step < 1:
            found = client.get(made.id)
            assert found.state in ("queued", "starting", "running"), f"{found.error}: {client.logs(made.id, 'job')}"
            assert time.monotonic() < deadline, client.logs(made.id, "job")
            time.sleep(0.3)
        up.kill()  # the job goes on without it
        up.start()
        with up.client() as again:
            done = again.wait(made.id, 300)
            assert done.state == "succeeded", done.error
            assert done.step == 6
            ledger = again.ledger(made.id)
            assert ledger["balanced"]
            assert ledger["trained"] == 12
            rows = again.rollouts(made.id, sort="-reward")
            assert len(rows) == 48
            assert again.trace(rows[0]["trace_id"])["job"] == made.id
            assert [point["step"] for point in again.metrics(made.id, kind="train")] == [1, 2, 3, 4, 5, 6]
            assert again.report(made.id)["steps"]["made"] == 6
            starts = [event for event in again.events(made.id, kinds=["job"]) if event.data["state"] == "starting"]
            assert len(starts) == 1, "the same process all along"
            folder = again.export(made.id, tmp_path / "out")
        AutoModelForCausalLM.from_pretrained(folder)
    assert leftovers(made.id) == []


def test_the_small_form_of_verl_runs(model: Path, tmp_path: Path) -> None:
    """tests/fixtures/verl_minimal.yaml as it is, with model and file replaced by local ones, and short."""
    source = Path(__file__).resolve().parents[2] / "fixtures" / "verl_minimal.yaml"
    config = yaml.safe_load(source.read_text())
    config["actor_rollout"]["model_name_or_path"] = config["critic"]["model_name_or_path"] = str(model)
    rows = [{"prompt": [{"role": "user", "content": f"{at}+1"}], "reward_model": {"ground_truth": str(at + 1)}}
            for at in range(16)]  # fmt: skip
    (tmp_path / "mine").mkdir()
    config["data"] |= {
        "train_files": [str(write_parquet(tmp_path / "mine" / "rows.parquet", rows))],
        "max_response_length": 16,
        "max_prompt_length": 200,
        "chat_template": None,
    }
    config["trainer"]["n_gpus_per_node"] = 1
    path = tmp_path / "mine" / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with Up(tmp_path / "data", "--allow-path", str(model), command=None) as up, up.client() as client:
        made = client.submit(path)
        done = client.wait(made.id, 350)
        assert done.state == "succeeded", f"{done.error}: {client.logs(made.id, 'job')[-2000:]}"
        assert done.step == 2
        metrics = client.metrics(made.id, kind="train")[-1]["metrics"]
        assert metrics["loss/critic"] is not None
        assert client.ledger(made.id)["balanced"]
