"""Preference pairs from files, and their conversion to parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from nightshift.config import JobSpec
from nightshift.config.data import DataConfig
from nightshift.data import Tokenizer
from nightshift.data.convert import convert_preferences
from nightshift.data.preferences import PairSet, load_pairs
from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import unpack_samples
from orchestrator.runner.preference import pair_samples, preference_spec
from tests.fixtures.rows import write_jsonl, write_parquet

ASK = [{"role": "user", "content": "1+1"}]


def turn(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def load(tokenizer: Tokenizer, rows: list[dict[str, Any]], folder: Path, longest: int = 9, **config: Any) -> PairSet:
    path = write_jsonl(folder / "pairs.jsonl", rows)
    return load_pairs(DataConfig(train_files=[str(path)], **config), [path], tokenizer, longest)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        {"prompt": ASK, "chosen": [turn("2")], "rejected": [turn("3")]},
        {"chosen": [*ASK, turn("2")], "rejected": [*ASK, turn("3")]},
    ],
    ids=["texts", "messages", "conversations"],
)
def test_all_forms_of_a_pair_give_the_same_ids(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    (pair,) = load(tokenizer, [row], tmp_path).pairs
    assert tokenizer.decode(pair.prompt_ids, skip_special_tokens=False) == "<bos>user:1+1<eot>assistant:"
    assert pair.chosen_ids.tolist() == [*tokenizer.encode("2", add_special_tokens=False).tolist(), tokenizer.end_id]
    assert (pair.chosen, pair.rejected) == ("2", "3")
    bare = load(tokenizer, [row], tmp_path, add_eos_token=False).pairs[0]
    assert len(bare.chosen_ids) == len(pair.chosen_ids) - 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "1+1", "chosen": "2", "rejected": "2"}, "the same"),
        ({"prompt": "1+1", "chosen": "", "rejected": "2"}, "chosen is empty"),
        ({"prompt": "1+1", "chosen": None, "rejected": "2"}, "chosen is null"),
        ({"chosen": "2", "rejected": "3"}, "no prompt"),
        ({"chosen": [*ASK, turn("2")], "rejected": [{"role": "user", "content": "x"}, turn("3")]}, "begin with"),
        ({"chosen": ASK, "rejected": [*ASK, turn("3")]}, "assistant"),
    ],
)
def test_rows_that_are_no_pairs_are_refused_by_number_or_dropped(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], says: str
) -> None:
    good = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    with pytest.raises(BadInputError, match=f"1 of 2 rows are no preference pairs: row 2: .*{says}"):
        load(tokenizer, [good, row], tmp_path)
    kept = load(tokenizer, [good, row], tmp_path, invalid_rows="drop")
    assert (len(kept), kept.dropped["invalid"]) == (1, 1)


def test_pairs_that_are_too_long_and_files_without_columns_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "1+1", "chosen": "2", "rejected": "3" * 40}, {"prompt": "1+1", "chosen": "2", "rejected": "3"}]
    with pytest.raises(BadInputError, match=r"row 1: .* 41 tokens"):
        load(tokenizer, rows, tmp_path)
    assert load(tokenizer, rows, tmp_path, overlong_prompts="drop").dropped["overlong"] == 1
    with pytest.raises(BadInputError, match="no column 'rejected'"):
        load(tokenizer, [{"prompt": "a", "chosen": "b"}], tmp_path)


def test_conversion_writes_parquet_that_loads_as_the_same_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        {"chosen": [*ASK, turn("2")], "rejected": [*ASK, turn("4")]},
    ]
    source = write_jsonl(tmp_path / "pairs.jsonl", rows)
    target = tmp_path / "made" / "pairs.parquet"
    assert convert_preferences(source, target) == 2
    assert pq.read_table(target).column_names == ["prompt", "chosen", "rejected"]
    config = DataConfig(train_files=["x"])
    one, other = (load_pairs(config, [path], tokenizer, 9).pairs for path in (source, target))
    for left, right in zip(one, other, strict=True):
        assert np.array_equal(left.prompt_ids, right.prompt_ids)
        assert np.array_equal(left.rejected_ids, right.rejected_ids)
    with pytest.raises(BadInputError, match="exists already"):
        convert_preferences(source, target)
    broken = write_jsonl(tmp_path / "broken.jsonl", [*rows, {"prompt": "1", "chosen": "2", "rejected": "2"}])
    with pytest.raises(BadInputError, match="row 3"):
        convert_preferences(broken, tmp_path / "never.parquet")
    assert not (tmp_path / "never.parquet").exists()


def test_the_command_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nightshift.cli.main import main

    source = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert main(["data", "convert", str(source), str(tmp_path / "pairs.parquet")]) == 0
    assert "1 pairs" in capsys.readouterr().out
    assert main(["data", "convert", str(source), str(tmp_path / "pairs.parquet")]) == 2


def test_a_batch_of_pairs_is_what_the_trainer_takes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from nightshift.wire.experience import pack_samples
    from services.trainer.checks import check_loss_spec, check_samples

    rows = [{"prompt": f"{at}+1", "chosen": "2", "rejected": "3"} for at in range(3)]
    path = write_parquet(tmp_path / "pairs.parquet", rows)
    config = DataConfig(train_files=[str(path)])
    samples = pair_samples(load_pairs(config, [path], tokenizer, 9).pairs, "0" * 32, "r/0/0")
    for sample in samples:
        sample.ref_logprobs = sample.logprobs - 1
    job = {
        "name": "dpo",
        "model": {"path": "m"},
        "data": {"train_files": [str(path)]},
        "algorithm": {"policy_loss": "dpo", "label_smoothing": 0.1},
    }
    spec = preference_spec(JobSpec.model_validate(job), samples)
    check_loss_spec(spec)
    check_samples(unpack_samples(pack_samples(samples)), spec, tokenizer.vocab_size, 128)
    assert spec.options == {"beta": 0.1, "label_smoothing": 0.1}
    assert json.dumps(spec.total_sequences) == "6"
