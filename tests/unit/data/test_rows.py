"""Rows of data files."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightshift.data.rows import read_table
from nightshift.wire.errors import BadInputError
from tests.fixtures.rows import write_dataset, write_jsonl, write_parquet

_ROWS = [{"a": 1, "b": "x", "c": [1.5]}, {"a": 2, "b": "y", "c": []}, {"a": 3, "b": "z", "c": [2.5]}]


@pytest.mark.parametrize(
    ("name", "write"), [("r.parquet", write_parquet), ("r.jsonl", write_jsonl), ("folder", write_dataset)]
)
def test_wanted_columns_and_all_column_names(tmp_path: Path, name: str, write) -> None:  # type: ignore[no-untyped-def]
    table = read_table(write(tmp_path / name, _ROWS), {"a", "c", "absent"})
    assert table.columns == ("a", "b", "c")
    assert [row.number for row in table.rows] == [1, 2, 3]
    assert [dict(row.values) for row in table.rows] == [{"a": row["a"], "c": row["c"]} for row in _ROWS]


def test_blank_lines_count_as_lines_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}')
    assert [row.number for row in read_table(tmp_path / "a.jsonl", {"a"}).rows] == [1, 3]


def test_a_json_file_may_be_one_list_or_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(_ROWS, indent=2), encoding="utf-8")
    assert [row.values["a"] for row in read_table(tmp_path / "a.json", {"a"}).rows] == [1, 2, 3]
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, _ROWS)), encoding="utf-8")
    assert [row.values["a"] for row in read_table(tmp_path / "a.json", {"a"}).rows] == [1, 2, 3]


def test_values_without_a_place_on_the_wire_become_text(tmp_path: Path) -> None:
    rows = [{"a": {"at": datetime.datetime(2026, 1, 2, 3), "price": decimal.Decimal("1.50")}, "b": [datetime.date.max]}]
    (row,) = read_table(write_parquet(tmp_path / "a.parquet", rows), {"a", "b"}).rows
    assert row.values == {"a": {"at": "2026-01-02T03:00:00", "price": "1.50"}, "b": ["9999-12-31"]}


def test_the_file_form_of_arrow_is_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(_ROWS)
    with pa.OSFile(str(tmp_path / "part.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert len(read_table(tmp_path, {"a"}).rows) == 3


def test_a_folder_of_parquet_files_is_read_in_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", _ROWS[1:])
    write_parquet(tmp_path / "a.parquet", _ROWS[:1])
    table = read_table(tmp_path, {"a"})
    assert [(row.number, row.values["a"]) for row in table.rows] == [(1, 1), (2, 2), (3, 3)]


def test_a_folder_with_splits(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d" / "train", _ROWS)
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}', encoding="utf-8")
    assert len(read_table(tmp_path / "d", {"a"}).rows) == 3
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    with pytest.raises(BadInputError, match="train, test"):
        read_table(tmp_path / "d", {"a"})


def test_a_selection_by_index_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", _ROWS)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(BadInputError, match="flatten_indices"):
        read_table(folder, {"a"})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"a,b", "format"),
        ("a.parquet", b"not parquet", "cannot be read"),
        ("a.jsonl", b'{"a": 1}\n{"a": ', "row 2 is not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "row 2: list"),
        ("a.jsonl", b'{"a": "\xff"}\n', "cannot be read"),
        ("a.json", b'[{"a": 1},', "not valid JSON"),
        ("a.json", b"[3]", "row 1: int"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        read_table(tmp_path / name, {"a"})
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no data file"):
        read_table(tmp_path / "absent.parquet", {"a"})
    folder = write_dataset(tmp_path / "d", _ROWS)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(BadInputError, match="data-00001-of-00002"):
        read_table(folder, {"a"})
    (folder / "data-00001-of-00002.arrow").write_bytes(b"damaged")
    with pytest.raises(BadInputError, match="data-00001-of-00002"):
        read_table(folder, {"a"})
    (folder / "state.json").write_text("[", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"state\.json"):
        read_table(folder, {"a"})


@pytest.mark.parametrize("row", [{"prompt": "\ud800"}, {"prompt": [{"role": "user", "content": "a\udfff"}]}])
def test_o26_text_that_is_no_unicode_is_refused_by_row_and_column(tmp_path: Path, row: dict[str, object]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(BadInputError, match=r"a\.jsonl', row 2: column 'prompt' holds text that is no Unicode"):
        read_table(path, {"prompt"})
    assert len(read_table(path, {"other"}).rows) == 2


def test_numbers_of_json_that_no_wire_holds_are_text(tmp_path: Path) -> None:
    values = [2**64 - 1, -(2**63), 2**64, -(2**63) - 1, True]
    (row,) = read_table(write_jsonl(tmp_path / "a.jsonl", [{"answer": values}]), {"answer"}).rows
    assert row.values["answer"] == [2**64 - 1, -(2**63), str(2**64), str(-(2**63) - 1), True]
    assert msgpack.unpackb(msgpack.packb(dict(row.values))) == row.values


def test_a_wanted_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["prompt", "prompt", "other"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInputError, match="two columns 'prompt'"):
        read_table(tmp_path / "a.parquet", {"prompt"})
    assert read_table(tmp_path / "a.parquet", {"other"}).rows[0].values == {"other": "c"}


@pytest.mark.parametrize("kind", ["large_string", "dictionary"])
def test_o25_texts_of_any_arrow_type_are_texts(tmp_path: Path, kind: str) -> None:
    texts = pa.array(["1+1", "2+2"])
    column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(pa.large_string())
    message = pa.StructArray.from_arrays([column, column], names=["role", "content"])
    turns = pa.LargeListArray.from_arrays(pa.array([0, 1, 2], pa.int64()), message)
    pq.write_table(pa.table({"a": column, "b": turns}), tmp_path / "a.parquet")
    rows = read_table(tmp_path / "a.parquet", {"a", "b"}).rows
    assert [row.values["a"] for row in rows] == ["1+1", "2+2"]
    assert rows[1].values["b"] == [{"role": "2+2", "content": "2+2"}]
