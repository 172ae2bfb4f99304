"""Rows of data files: parquet, JSON lines, and HF ``datasets`` folders on disk."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nightshift.wire.errors import BadInputError

_ROLE = "job"
_JSON = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (".parquet", *_JSON)


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        number: from 1: the line in a JSON-lines file, the place in any other.
        values: the wanted columns that the row has.
    """

    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one file or folder.

    Attributes:
        path: as the job names it.
        columns: all columns of the file, in its order, also those that were not wanted.
        rows: in the file's order.
    """

    path: str
    columns: tuple[str, ...]
    rows: list[Row]


def read_table(path: str | Path, wanted: Collection[str]) -> Table:
    """Reads the wanted columns of a file or an HF ``datasets`` folder.

    Values become plain Python ones; dates and times become ISO text, decimals and integers beyond 64 bits
    text, so that they fit on the wire.

    Raises:
        BadInputError: no such file, another format, a wanted column that comes twice, or a malformed row (named by its
            number): text that is no Unicode counts as such.
    """
    source = Path(path)
    if source.is_dir():
        return _read_folder(source, wanted)
    if not source.is_file():
        raise BadInputError(f"no data file {str(source)!r}", role=_ROLE)
    return _read_file(source, wanted)


def _read_file(source: Path, wanted: Collection[str]) -> Table:
    suffix = source.suffix.lower()
    if suffix not in _SUFFIXES:
        raise BadInputError(
            f"data file {str(source)!r} has a format that is not known",
            role=_ROLE,
            fix=f"Give a file that ends in {', '.join(_SUFFIXES)}, or a folder that datasets' save_to_disk wrote",
        )
    try:
        if suffix == ".parquet":
            with pq.ParquetFile(source) as file:
                names = file.schema_arrow.names
                keep = [name for name in names if name in wanted]
                return _collect(source, names, file.iter_batches(batch_size=1024, columns=keep))
        return _read_json_file(source, wanted)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"data file {str(source)!r} cannot be read: {error}", role=_ROLE) from error


def _collect(source: Path, names: list[str], batches: Iterator[pa.RecordBatch]) -> Table:
    rows: list[Row] = []
    for batch in batches:
        _refuse_twins(source, batch.schema.names)
        for values in batch.to_pylist():
            rows.append(_row(source, len(rows) + 1, values))
    return Table(str(source), tuple(names), rows)


def _refuse_twins(source: Path, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInputError(f"data file {str(source)!r} has two columns {twice!r}", role=_ROLE, fix="Rename one")


def _row(source: Path, number: int, values: Mapping[str, Any]) -> Row:
    plain: dict[str, Any] = {}
    for name, value in values.items():
        try:
            plain[name] = _plain(value)
        except UnicodeEncodeError as error:
            raise BadInputError(
                f"data file {str(source)!r}, row {number}: column {name!r} holds text that is no Unicode "
                f"({error.reason})",
                role=_ROLE,
                fix="Correct it, or leave the row out",
            ) from error
    return Row(number, plain)


def _read_json_file(source: Path, wanted: Collection[str]) -> Table:
    columns: dict[str, None] = {}
    rows: list[Row] = []
    for number, value in _json_values(source):
        if not isinstance(value, dict):
            raise BadInputError(
                f"data file {str(source)!r}, row {number}: {type(value).__name__}, expected a map of columns",
                role=_ROLE,
            )
        columns.update(dict.fromkeys(value))
        rows.append(_row(source, number, {name: item for name, item in value.items() if name in wanted}))
    return Table(str(source), tuple(columns), rows)


def _json_values(source: Path) -> Iterator[tuple[int, Any]]:
    """Values with their row numbers: one a line, or the items of one JSON list."""
    with source.open(encoding="utf-8-sig") as file:
        if source.suffix.lower() == ".json" and file.read(1 << 16).lstrip()[:1] == "[":
            file.seek(0)
            try:
                yield from enumerate(json.load(file), start=1)
            except ValueError as error:
                raise BadInputError(f"data file {str(source)!r} is not valid JSON: {error}", role=_ROLE) from error
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise BadInputError(
                    f"data file {str(source)!r}, row {number} is not valid JSON: {error}", role=_ROLE
                ) from error
            yield number, value


def _read_folder(folder: Path, wanted: Collection[str]) -> Table:
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _json_map(splits).get("splits", [])
        if len(names) == 1:
            return _read_folder(folder / str(names[0]), wanted)
        raise BadInputError(
            f"data folder {str(folder)!r} holds the splits {', '.join(map(str, names))}",
            role=_ROLE,
            fix=f"Name one of them, such as {str(folder / str(names[0] if names else 'train'))!r}",
        )
    state = _json_map(folder / "state.json") if (folder / "state.json").is_file() else {}
    if state.get("_indices_data_files"):
        raise BadInputError(
            f"data folder {str(folder)!r} holds a selection of rows by index",
            role=_ROLE,
            fix="Save it again after flatten_indices()",
        )
    listed = [folder / str(item.get("filename")) for item in state.get("_data_files") or []]
    files = listed or sorted(folder.glob("*.arrow"))
    if not files:
        return _read_plain_folder(folder, wanted)
    columns: dict[str, None] = {}
    rows: list[Row] = []
    for file in files:
        for part in _read_arrow(file, wanted, columns):
            rows.append(_row(file, len(rows) + 1, part))
    return Table(str(folder), tuple(columns), rows)


def _read_plain_folder(folder: Path, wanted: Collection[str]) -> Table:
    """A folder of data files of one kind, in the order of their names."""
    for suffix in _SUFFIXES:
        tables = [_read_file(file, wanted) for file in sorted(folder.glob(f"*{suffix}"))]
        if tables:
            columns = dict.fromkeys(name for table in tables for name in table.columns)
            values = [row.values for table in tables for row in table.rows]
            rows = [Row(number, value) for number, value in enumerate(values, start=1)]
            return Table(str(folder), tuple(columns), rows)
    raise BadInputError(f"data folder {str(folder)!r} holds no arrow, parquet or JSON-lines file", role=_ROLE)


def _read_arrow(file: Path, wanted: Collection[str], columns: dict[str, None]) -> Iterator[Mapping[str, Any]]:
    try:
        with pa.memory_map(str(file)) as source:
            try:
                reader: Any = pa.ipc.open_stream(source)
                batches: Iterator[pa.RecordBatch] = iter(reader)
            except pa.ArrowInvalid:  # datasets writes streams; other tools write the file form
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            columns.update(dict.fromkeys(reader.schema.names))
            keep = [name for name in reader.schema.names if name in wanted]
            _refuse_twins(file, keep)
            for batch in batches:
                yield from batch.select(keep).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"data file {str(file)!r} cannot be read: {error}", role=_ROLE) from error


def _json_map(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{str(path)!r} cannot be read: {error}", role=_ROLE) from error
    if not isinstance(value, dict):
        raise BadInputError(f"{str(path)!r} holds {type(value).__name__}, expected a map", role=_ROLE)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):  # arrow maps come as lists of pairs
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal):
        return str(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, str) and not value.isascii():
        value.encode()  # a lone surrogate, which JSON can spell, fits neither a tokenizer nor the wire
    return value
