"""The walk over the prompts of a job: weights of files, and a user's order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from nightshift.cli.data import check_data
from nightshift.config.load import load_job
from nightshift.wire.errors import BadInputError, NightshiftError
from orchestrator.runner.inputs import load_inputs, make_cursor
from orchestrator.runner.preference import PreferenceInputs
from tests.fixtures.rows import write_jsonl
from tests.fixtures.tokenizer_k import write_folder


def make_job(folder: Path, source: str = "", **data: Any) -> Any:
    import yaml

    for name, count in (("easy", 4), ("hard", 2)):
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": f"{name} {at}", "data_source": name} for at in range(count)])
    (folder / "reward.py").write_text("def score(response):\n    return 1.0\n")
    (folder / "order.py").write_text(source)
    job = {
        "name": "t",
        "model": {"path": str(write_folder(folder / "model"))},
        "data": {"train_files": ["easy.jsonl", "hard.jsonl"], "max_prompt_length": 32, **data},
        "rewards": [{"function": "reward.py:score"}],
        "rollout": {"batch_size": 2, "max_response_length": 8},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return load_job(folder / "job.yaml")


def first(spec: Any, count: int) -> list[str]:
    inputs = load_inputs(spec)
    cursor = make_cursor(spec, inputs.train)
    return [inputs.train.prompts[cursor.next()[1]].row_id for _ in range(count)]


def test_files_are_mixed_by_weight(tmp_path: Path) -> None:
    rows = first(make_job(tmp_path, weights=[0.5, 3]), 8)
    assert sum(row.startswith("easy") for row in rows) == 2
    assert sorted(row for row in rows if row.startswith("hard")) == ["hard.jsonl:1"] * 3 + ["hard.jsonl:2"] * 3


def test_a_curriculum_puts_prompts_with_low_numbers_first(tmp_path: Path) -> None:
    source = "def order(prompts, epoch):\n    return [p.data_source == 'easy' for p in prompts]\n"
    rows = first(make_job(tmp_path, source, curriculum="order.py:order"), 6)
    assert [row[:4] for row in rows] == ["hard"] * 2 + ["easy"] * 4


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def order(prompts):\n    return []\n", r"takes \(prompts\), expected \(prompts, epoch\)"),
        ("def other(prompts, epoch):\n    return []\n", "no function 'order'"),
    ],
)
def test_a_curriculum_with_another_signature_is_refused_before_anything_is_loaded(
    tmp_path: Path, source: str, says: str
) -> None:
    with pytest.raises(BadInputError, match=says):
        make_job(tmp_path, source, curriculum="order.py:order")


def test_a_curriculum_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "orders_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sorted.py").write_text(
        "def hard_first(prompts, epoch):\n    return [p.data_source == 'easy' for p in prompts]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = make_job(tmp_path, curriculum="orders_of_mine.sorted.hard_first")
    assert spec.data.curriculum == "orders_of_mine.sorted.hard_first"
    assert "orders_of_mine" not in sys.modules  # reading the job runs nothing of it
    assert [row[:4] for row in first(spec, 6)] == ["hard"] * 2 + ["easy"] * 4


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def order(prompts, epoch):\n    return [1]\n", "6 prompts"),
        ("def order(prompts, epoch):\n    return [float('nan')] * 6\n", "not finite"),
        ("def order(prompts, epoch):\n    raise KeyError('x')\n", "raised KeyError"),
    ],
)
def test_what_a_curriculum_returns_is_checked(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(NightshiftError, match=says):
        first(make_job(tmp_path, source, curriculum="order.py:order"), 1)


def test_weights_belong_to_files(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="1 numbers for 2"):
        make_job(tmp_path, weights=[1.0])
    with pytest.raises(BadInputError, match="above 0"):
        make_job(tmp_path, weights=[0, 0])


def test_epochs_are_counted_in_rows_under_the_weights(tmp_path: Path) -> None:
    spec = make_job(tmp_path, weights=[0.5, 3])
    inputs = load_inputs(spec)
    assert spec.trainer.total_epochs == 1
    assert inputs.total_steps == 4  # 2 + 6 rows in batches of 2, and not the 6 rows of the files
    cursor = make_cursor(spec, inputs.train)
    assert [cursor.next()[0] for _ in range(9)] == [0] * 8 + [1]
    assert check_data(spec).total_steps == inputs.total_steps


def test_pairs_are_mixed_and_ordered_as_prompts_are(tmp_path: Path) -> None:
    source = "def order(pairs, epoch):\n    return [-len(pair.chosen) for pair in pairs]\n"
    spec = make_job(tmp_path, source, weights=[0.5, 3], curriculum="order.py:order")
    for name, count in (("easy", 4), ("hard", 2)):
        rows = [{"prompt": f"{name}", "chosen": "x" * (at + 1), "rejected": "y"} for at in range(1, count + 1)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    spec.algorithm.policy_loss = "dpo"
    inputs = PreferenceInputs(spec)
    assert inputs.total_steps == check_data(spec).total_steps == 4
    cursor = make_cursor(spec, inputs.train)
    found = [inputs.train.pairs[cursor.next()[1]] for _ in range(8)]
    assert [pair.row_id for pair in found if pair.row_id.startswith("hard")] == ["hard.jsonl:2"] * 3 + [
        "hard.jsonl:1"
    ] * 3
    lengths = [len(pair.chosen) for pair in found]
    assert lengths == sorted(lengths, reverse=True)
