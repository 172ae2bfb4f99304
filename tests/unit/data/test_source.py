"""Prompts from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.config.data import DataConfig
from nightshift.data import PromptSet, Tokenizer, check_context, load_prompts, require_columns, require_rewards
from nightshift.wire.errors import BadInputError
from tests.fixtures.rows import ROWS_D, write_dataset, write_jsonl, write_parquet
from tests.fixtures.tokenizer_k import BOS, TEMPLATE_WITHOUT_SYSTEM, write_folder

_TEXT = "1+1"
_MESSAGES = [{"role": "user", "content": "1+1"}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
_WRITERS = {"rows.jsonl": write_jsonl, "rows.parquet": write_parquet, "rows": write_dataset}
WRITERS = pytest.mark.parametrize("name", _WRITERS)


def _load(tokenizer: Tokenizer, *paths: Path, **config: Any) -> PromptSet:
    return load_prompts(DataConfig(train_files=[str(path) for path in paths], **config), list(paths), tokenizer)


def _refusal(tokenizer: Tokenizer, *paths: Path, **config: Any) -> str:
    with pytest.raises(BadInputError) as caught:
        _load(tokenizer, *paths, **config)
    assert caught.value.exit_code == 2
    return str(caught.value)


@WRITERS
def test_data_files_for_verl_load_as_they_are(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    prompts = _load(tokenizer, _WRITERS[name](tmp_path / name, ROWS_D))
    assert [prompt.ground_truth for prompt in prompts.prompts] == ["2", "4", "6", "8"]
    assert [prompt.row_id for prompt in prompts.prompts] == [f"{name}:{row}" for row in (1, 2, 3, 4)]
    first = prompts.prompts[0]
    assert first.prompt == [{"role": "user", "content": "1 + 1?"}]
    assert first.prompt_ids.dtype == np.int32
    assert tokenizer.decode(first.prompt_ids, skip_special_tokens=False) == "<bos>user:1 + 1?<eot>assistant:"
    assert first.data_source == "sums"
    assert first.extra_info == {"index": 1, "split": "train"}
    assert prompts.summary() == "4 prompts of 4 rows"
    require_columns(prompts, {"ground_truth", "data_source", "extra_info", "response"})


@WRITERS
@pytest.mark.parametrize("shape", [_TEXT, _MESSAGES, _PARTS], ids=["text", "messages", "parts"])
def test_o25_shapes_of_a_prompt(tmp_path: Path, tokenizer: Tokenizer, name: str, shape: Any) -> None:
    path = _WRITERS[name](tmp_path / name, [{"prompt": shape}, {"prompt": shape}])
    expected = tokenizer.encode("<bos>user:1+1<eot>assistant:", add_special_tokens=False).tolist()
    prompts = _load(tokenizer, path)
    assert [prompt.prompt_ids.tolist() for prompt in prompts.prompts] == [expected, expected]
    assert prompts.prompts[0].prompt == (_TEXT if shape == _TEXT else _MESSAGES)
    raw = _load(tokenizer, path, apply_chat_template=False).prompts[0].prompt_ids.tolist()
    assert raw == (tokenizer.encode("1+1").tolist() if shape == _TEXT else expected)
    assert raw.count(BOS) == 1


def test_o25_null_keys_that_parquet_adds_to_messages_make_no_difference(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": _MESSAGES}, {"prompt": [{"role": "user", "content": "1+1", "name": "x"}]}]
    one = _load(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows))
    other = _load(tokenizer, write_parquet(tmp_path / "a.parquet", rows))
    assert [prompt.prompt for prompt in one.prompts] == [prompt.prompt for prompt in other.prompts]
    assert other.prompts[0].prompt == _MESSAGES


@WRITERS
def test_o25_a_missing_prompt_column_is_refused(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    path = _WRITERS[name](tmp_path / name, [{"prompts": "1+1", "answer": "2"}] * 2)
    message = _refusal(tokenizer, path)
    for part in ("'prompt'", str(path), "prompts, answer", "data.prompt_key"):
        assert part in message
    assert len(_load(tokenizer, path, prompt_key="prompts")) == 2


@WRITERS
def test_o25_a_missing_reward_model_is_refused_when_a_reward_reads_it(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    path = _WRITERS[name](tmp_path / name, [{"prompt": "1+1", "data_source": "sums"}] * 2)
    prompts = _load(tokenizer, path)
    require_columns(prompts, {"data_source"})
    require_columns(prompts, {"response", "finish_reason"})
    with pytest.raises(BadInputError) as caught:
        require_columns(prompts, {"ground_truth"})
    for part in ("'reward_model'", str(path), "prompt, data_source"):
        assert part in str(caught.value)
    with pytest.raises(BadInputError, match="'extra_info'"):
        require_columns(prompts, {"extra_info"})


def test_o25_a_reward_model_without_a_ground_truth_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "reward_model": {"style": "rule"}}])
    with pytest.raises(BadInputError, match="'reward_model' with a ground_truth"):
        require_columns(_load(tokenizer, path), {"ground_truth"})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"ground_truth": "2"}, "2"),
        ({"answer": 2}, 2),
        ({"answer": 3, "ground_truth": [2]}, [2]),
        ({"answer": 3, "reward_model": {"ground_truth": {"n": 2}}}, {"n": 2}),
        ({"answer": 3, "reward_model": {"style": "rule"}}, 3),
        ({"reward_model": {"ground_truth": None}, "answer": 3}, None),
    ],
)
def test_where_the_ground_truth_comes_from(tmp_path: Path, tokenizer: Tokenizer, row: Any, expected: Any) -> None:
    prompts = _load(tokenizer, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", **row}]))
    assert prompts.prompts[0].ground_truth == expected
    require_columns(prompts, {"ground_truth"})


_GAPS: list[dict[str, Any]] = [
    {"prompt": "1", "answer": "1", "extra_info": {"a": 1}},
    {"prompt": None, "answer": "2", "extra_info": {"a": 1}},
    {"prompt": "", "answer": "3", "extra_info": {"a": 1}},
    {"prompt": [], "answer": "4", "extra_info": {"a": 1}},
    {"prompt": "5", "answer": "5"},
    {"prompt": "6", "answer": None, "extra_info": {"a": 1}},
    {"prompt": "7", "answer": "null", "extra_info": {"a": 1}},
]


def test_o26_rows_without_a_prompt_are_refused_by_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    message = _refusal(tokenizer, write_jsonl(tmp_path / "a.jsonl", _GAPS))
    for part in ("3 of 7 rows", "row 2: null", "row 3: empty text", "row 4: empty list", "data.invalid_rows"):
        assert part in message


def test_o26_or_dropped_and_counted_with_the_order_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = _load(tokenizer, write_jsonl(tmp_path / "a.jsonl", _GAPS), invalid_rows="drop")
    assert prompts.dropped == {"invalid": 3, "template": 0, "overlong": 0}
    assert prompts.rows == 7
    assert prompts.summary() == "4 prompts of 7 rows, 3 dropped (invalid)"
    assert [prompt.row_id for prompt in prompts.prompts] == [f"a.jsonl:{row}" for row in (1, 5, 6, 7)]
    assert [prompt.ground_truth for prompt in prompts.prompts] == ["1", "5", None, "null"]
    assert [prompt.extra_info for prompt in prompts.prompts] == [{"a": 1}, None, {"a": 1}, {"a": 1}]
    require_columns(prompts, {"extra_info", "ground_truth"})


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (3, "int"),
        ({"role": "user"}, "dict"),
        (["text"], "message 0 is str"),
        ([{"content": "x"}], "no role"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": " "}], "without text"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'text'"),
        ("   ", "empty text"),
    ],
)
def test_o26_other_unusable_prompts(tmp_path: Path, tokenizer: Tokenizer, prompt: Any, reason: str) -> None:
    message = _refusal(tokenizer, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": prompt}]))
    assert "row 2: " in message
    assert reason in message


def test_long_lists_of_bad_rows_are_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    message = _refusal(tokenizer, write_jsonl(tmp_path / "a.jsonl", [{"prompt": None}] * 9 + [{"prompt": "1"}]))
    assert "9 of 10 rows" in message
    assert "and 4 more" in message


def test_o27_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", template=None))
    for name, prompt in (("m", _MESSAGES), ("t", _TEXT)):
        for invalid_rows in ("error", "drop"):
            path = write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": prompt}])
            message = _refusal(tokenizer, path, invalid_rows=invalid_rows)
            assert "chat_template" in message
            assert ("apply_chat_template" in message) == (prompt == _TEXT)
    assert len(_load(tokenizer, tmp_path / "t.jsonl", apply_chat_template=False)) == 1


_SYSTEM = [
    {"prompt": [{"role": "user", "content": "a"}]},
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]},
    {"prompt": [{"role": "user", "content": "c"}]},
    {"prompt": [{"role": "system", "content": "t"}, {"role": "user", "content": "d"}]},
]


def test_o27_a_refused_system_role(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", template=TEMPLATE_WITHOUT_SYSTEM))
    path = write_parquet(tmp_path / "a.parquet", _SYSTEM)
    message = _refusal(tokenizer, path)
    for part in ("2 of 4 rows", "row 2", "row 4", "System role not supported", "data.system_role"):
        assert part in message
    folded = _load(tokenizer, path, system_role="fold")
    texts = [tokenizer.decode(prompt.prompt_ids, skip_special_tokens=False) for prompt in folded.prompts]
    assert texts == [
        "<bos>user:a<eot>assistant:",
        "<bos>user:s\n\nb<eot>assistant:",
        "<bos>user:c<eot>assistant:",
        "<bos>user:t\n\nd<eot>assistant:",
    ]
    dropped = _load(tokenizer, path, invalid_rows="drop")
    assert dropped.dropped["template"] == 2
    assert len(dropped) == 2


def test_o27_nothing_is_injected_into_rows_without_a_system_turn(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", template=TEMPLATE_WITHOUT_SYSTEM))
    rows = [_SYSTEM[0], _SYSTEM[2]]
    for system_role in ("error", "fold"):
        prompts = _load(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows), system_role=system_role)
        for prompt, row in zip(prompts.prompts, rows, strict=True):
            text = tokenizer.apply_chat_template(row["prompt"])
            assert prompt.prompt_ids.tolist() == tokenizer.encode(text, add_special_tokens=False).tolist()


def test_o27_a_template_that_takes_system_turns_is_not_folded(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = _load(tokenizer, write_jsonl(tmp_path / "a.jsonl", _SYSTEM), system_role="fold")
    text = tokenizer.decode(prompts.prompts[1].prompt_ids, skip_special_tokens=False)
    assert text == "<bos>system:s<eot>user:b<eot>assistant:"


def test_o27_a_system_turn_without_a_user_turn_cannot_be_folded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "k", template=TEMPLATE_WITHOUT_SYSTEM))
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "system", "content": "s"}]}])
    assert "row 1" in _refusal(tokenizer, path, system_role="fold")


#: Without a template and BOS, a text of n letters (never "ab") has n ids.
_LENGTHS = [{"prompt": "cdefghijklmnopqrstuvwxyz"[:length]} for length in (6, 8, 9, 20)]


@pytest.fixture
def bare(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path / "bare", adds_bos=False))


_RAW = {"apply_chat_template": False, "max_prompt_length": 8}


def test_o28_too_long_is_refused_with_row_and_length(tmp_path: Path, bare: Tokenizer) -> None:
    message = _refusal(bare, write_jsonl(tmp_path / "a.jsonl", _LENGTHS), **_RAW)
    for part in ("2 of 4 rows", "row 3: 9 tokens", "row 4: 20 tokens", "max_prompt_length 8"):
        assert part in message


def test_o28_or_dropped_and_counted(tmp_path: Path, bare: Tokenizer) -> None:
    prompts = _load(bare, write_jsonl(tmp_path / "a.jsonl", _LENGTHS), **_RAW, overlong_prompts="drop")
    assert [len(prompt.prompt_ids) for prompt in prompts.prompts] == [6, 8]
    assert "2 dropped (overlong)" in prompts.summary()


def test_o28_or_cut_to_the_last_ids(tmp_path: Path, bare: Tokenizer) -> None:
    prompts = _load(bare, write_jsonl(tmp_path / "a.jsonl", _LENGTHS), **_RAW, overlong_prompts="left")
    assert [len(prompt.prompt_ids) for prompt in prompts.prompts] == [6, 8, 8, 8]
    for prompt, row in zip(prompts.prompts, _LENGTHS, strict=True):
        assert prompt.prompt_ids.tolist() == bare.encode(row["prompt"])[-8:].tolist()
    assert prompts.cut == 2
    assert "2 cut" in prompts.summary()


def test_o28_all_too_long_is_refused(tmp_path: Path, bare: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", _LENGTHS[2:])
    message = _refusal(bare, path, **_RAW, overlong_prompts="drop")
    assert "no prompt is left" in message
    assert "2 dropped (overlong)" in message


def test_o28_prompt_and_response_must_fit_into_the_model(tokenizer: Tokenizer) -> None:
    check_context(tokenizer, 64, 64)
    with pytest.raises(BadInputError) as caught:
        check_context(tokenizer, 65, 64)
    for number in ("65", "64", "129", "128"):
        assert number in str(caught.value)
    with pytest.raises(BadInputError, match=r"rollout\.max_model_len"):
        check_context(tokenizer, 64, 64, max_model_len=100)


@WRITERS
def test_an_empty_file_is_refused(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    if name == "rows":
        (tmp_path / name).mkdir()
    elif name == "rows.parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / name)
    else:
        (tmp_path / name).write_text("\n\n", encoding="utf-8")
    message = _refusal(tokenizer, tmp_path / name)
    assert str(tmp_path / name) in message
    assert "no rows" in message or "holds no" in message


def test_no_files_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInputError, match="empty"):
        load_prompts(DataConfig(train_files=["x"]), [], tokenizer)


def test_all_rows_dropped_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": None}, {"prompt": ""}])
    assert "no prompt is left" in _refusal(tokenizer, path, invalid_rows="drop")


def test_several_files_keep_their_order_and_unique_row_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "x").mkdir()
    one = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}])
    two = write_jsonl(tmp_path / "x" / "a.jsonl", [{"prompt": "2"}])
    three = write_parquet(tmp_path / "b.parquet", [{"prompt": "3"}])
    prompts = _load(tokenizer, one, two, three)
    assert [prompt.prompt for prompt in prompts.prompts] == ["1", "2", "3"]
    assert [prompt.row_id for prompt in prompts.prompts] == ["0/a.jsonl:1", "1/a.jsonl:1", "b.parquet:1"]
    with pytest.raises(BadInputError, match=r"x/a\.jsonl"):
        require_columns(
            _load(tokenizer, write_jsonl(tmp_path / "c.jsonl", [{"prompt": "1", "answer": 1}]), two), {"ground_truth"}
        )


def test_an_id_that_the_model_does_not_have_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.vocab_size = 40
    message = _refusal(tokenizer, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "1:"}]))
    assert "vocab_size is 40" in message


def test_a_prompt_that_encodes_to_nothing_is_unusable(tmp_path: Path, bare: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "ÄÖÜ"}])
    assert "row 2: no tokens" in _refusal(bare, path, apply_chat_template=False)


def test_a_template_of_another_tokenizer_gives_a_warning(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}])
    assert _load(Tokenizer.load(tokenizer_folder), path).warnings == ()
    (warning,) = _load(Tokenizer.load(tokenizer_folder, "chatml"), path, max_prompt_length=99).warnings
    assert "<|im_start|>" in warning


def test_prompts_that_no_reward_scores_are_refused_by_row_and_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "1+1", "data_source": "sums"}, {"prompt": "a poem", "data_source": "poems"}]
    prompts = _load(tokenizer, write_jsonl(tmp_path / "rows.jsonl", rows))
    require_rewards(prompts, [["sums"], None])
    require_rewards(prompts, [["sums"], ["poems", "other"]])
    with pytest.raises(BadInputError, match=r"rows\.jsonl:2 has data_source 'poems'"):
        require_rewards(prompts, [["sums"]])
