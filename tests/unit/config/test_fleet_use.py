"""Section ``rollout.fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nightshift.cli.run import run_job
from nightshift.config import JobSpec
from nightshift.config.load import read_resolved, write_resolved
from nightshift.transfer import weight_transfer
from nightshift.wire.errors import BadInputError

BASE: dict[str, Any] = {
    "name": "lent",
    "model": {"path": "/model"},
    "data": {"train_files": ["/rows.parquet"]},
    "rewards": [{"function": "/reward.py:score"}],
}


def job(**sections: Any) -> JobSpec:
    return JobSpec.model_validate({**BASE, **sections})


def test_a_fleet_by_its_name_alone_or_with_terms_outlives_its_file(tmp_path: Path) -> None:
    short = job(rollout={"fleet": "night"})
    assert short.rollout.fleet is not None
    assert (short.rollout.fleet.name, short.rollout.fleet.weight, short.rollout.own_servers) == ("night", 1.0, 0)
    long = job(rollout={"fleet": {"name": "night", "weight": 2, "min_servers": 1, "max_servers": 4}})
    for spec in (short, long, job()):
        write_resolved(spec, tmp_path / "job.yaml")
        assert read_resolved(tmp_path / "job.yaml") == spec
    assert job().rollout.own_servers == 1


def test_weights_reach_a_fleet_over_http() -> None:
    assert weight_transfer(job(rollout={"fleet": "night"}), "cuda") == "http"
    assert (
        weight_transfer(job(rollout={"fleet": "night", "weight_transfer": "shared_memory"}), "cpu") == "shared_memory"
    )


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"rollout": {"fleet": "../x"}}, "String should match pattern"),
        ({"rollout": {"fleet": {"name": "night", "weight": 0}}}, "greater than 0"),
        ({"rollout": {"fleet": {"name": "night", "weight": float("nan")}}}, "finite number"),
        ({"rollout": {"fleet": {"name": "night", "min_servers": 3, "max_servers": 2}}}, "min_servers 3 is more than"),
        ({"rollout": {"fleet": {"name": "night", "share": 1}}}, "Extra inputs"),
        ({"rollout": {"fleet": "night", "url": "http://h"}}, "rollout.url names others"),
        ({"rollout": {"fleet": "night", "servers": 2}}, "rollout.servers names others"),
        ({"rollout": {"fleet": "night", "weight_transfer": "ipc"}}, "ipc reaches no server"),
        (
            {"rollout": {"fleet": "night"}, "pipeline": {"deterministic": True, "max_staleness": 0}},
            "pipeline.deterministic cannot hold",
        ),
        ({"rollout": {"fleet": "night"}, "algorithm": {"policy_loss": "dpo"}, "rewards": []}, "samples nothing"),
    ],
)
def test_what_is_no_use_of_a_fleet(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="fleet") as caught:
        job(**sections)
    assert says in str(caught.value)


def test_a_run_without_a_service_has_nobody_to_lend_it_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIGHTSHIFT_FENCE", raising=False)
    monkeypatch.setattr("nightshift.cli.prepare.check_installation", lambda: None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "reward.py").write_text("def score(response):\n    return 0.0\n")
    (tmp_path / "job.yaml").write_text(
        "{name: lent, model: {path: 'builtin:smollm2-135m-instruct'}, data: {train_files: [rows.jsonl]}, "
        "rewards: [{function: 'reward.py:score'}], rollout: {fleet: night}}"
    )
    with pytest.raises(BadInputError, match="'night' is lent by a job service") as caught:
        run_job(tmp_path / "job.yaml", [])
    assert "nightshift submit" in caught.value.fix
