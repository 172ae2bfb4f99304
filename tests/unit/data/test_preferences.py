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
from tests.fixtures.tokenizer_k import TEMPLATE_WITHOUT_SYSTEM, write_folder

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


def test_o28_long_prompts_of_pairs_keep_their_last_tokens_where_the_job_says_so(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    whole = load(tokenizer, [row], tmp_path).pairs[0].prompt_ids
    found = load(tokenizer, [row], tmp_path, max_prompt_length=8, overlong_prompts="left")
    assert found.pairs[0].prompt_ids.tolist() == whole[-8:].tolist()
    assert (found.cut, "1 cut" in found.summary()) == (1, True)


def test_o27_a_system_turn_of_a_pair_is_folded_where_the_template_refuses_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "model", template=TEMPLATE_WITHOUT_SYSTEM))
    row = {"prompt": [{"role": "system", "content": "be short"}, *ASK], "chosen": "2", "rejected": "3"}
    with pytest.raises(BadInputError, match=r"row 1: .*System role"):
        load(tokenizer, [row], tmp_path)
    (pair,) = load(tokenizer, [row], tmp_path, system_role="fold").pairs
    text = tokenizer.decode(pair.prompt_ids, skip_special_tokens=False)
    assert text == "<bos>user:be short\n\n1+1<eot>assistant:"


def test_an_answer_with_an_id_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))
    row = {"prompt": "12", "chosen": "2?", "rejected": "3"}
    with pytest.raises(BadInputError, match=r"row 1: the tokenizer gives id .* vocab_size is 40"):
        load(Tokenizer.load(folder), [row], tmp_path, apply_chat_template=False)


def test_a_built_in_template_that_the_tokenizer_has_no_tokens_for_is_said(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "model"), "chatml")
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert "<|im_start|>" in load(tokenizer, [row], tmp_path).warnings[0]


def test_pairs_of_files_with_one_name_have_names_of_their_own_and_weights(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = []
    for folder, count in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        rows = [{"prompt": f"{folder}{at}", "chosen": "2", "rejected": "3"} for at in range(count)]
        files.append(write_jsonl(tmp_path / folder / "pairs.jsonl", rows))
    found = load_pairs(DataConfig(train_files=[str(path) for path in files]), files, tokenizer, 9)
    assert [pair.row_id for pair in found.pairs] == ["0/pairs.jsonl:1", "1/pairs.jsonl:1", "1/pairs.jsonl:2"]
    assert found.parts([3.0, 0.5]) == [(1, 3.0), (2, 0.5)]


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
