"""What a run's folder holds, read piece by piece. Nothing here waits or writes."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nightshift.cli.runs import checkpoints

_CHUNK = 1 << 20
_BLOCK = 512
#: Columns that decide which samples are shown, and in which order.
_KEYS = ("step", "group_id", "sample_id", "reward", "response_tokens", "prompt_tokens", "finish_reason", "trace_id")
#: Columns of a page.
_SHOWN = (*_KEYS, "row_id", "epoch", "prompt_text", "response_text", "reward_error", "versions", "version_starts")
_COSTS = ("generate_seconds", "reward_seconds", "reference_seconds", "critic_seconds", "peak_memory_bytes")
#: Most samples that are looked through at once; a step filter narrows them.
_MOST_ROWS = 500_000


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Which samples, in which order. ``sort``: a column, with ``-`` in front for the greatest first."""

    step: int | None = None
    group_id: str | None = None
    trace_id: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    finish_reason: str | None = None
    sort: str = "-step"
    offset: int = 0
    limit: int = 50


def rollouts(folder: Path, query: RolloutQuery) -> tuple[int, list[dict[str, Any]]]:
    """How many stored samples fit, and one page of them."""
    tables: list[pa.Table] = []
    rows = 0
    files = sorted(folder.glob("step_*.parquet"), reverse=True)
    if query.step is not None:
        files = [file for file in files if file.stem == f"step_{query.step:06d}"]
    if query == RolloutQuery(step=query.step, offset=query.offset, limit=query.limit):
        return _newest(files, query.offset, query.limit)
    for at, file in enumerate(files):
        table = _read(file, _KEYS)
        if table is None:
            continue
        count = table.num_rows
        table = table.append_column("_file", pa.array([at] * count, pa.int32()))
        tables.append(table.append_column("_row", pa.array(range(count), pa.int64())))
        rows += count
        if rows > _MOST_ROWS:
            break
    if not tables:
        return 0, []
    table = _filter(pa.concat_tables(tables, promote_options="default"), query)
    column = query.sort.removeprefix("-")
    order = "descending" if query.sort.startswith("-") else "ascending"
    keys = [(column, order), *((key, "ascending") for key in ("step", "sample_id") if key != column)]
    page = table.take(pc.sort_indices(table, sort_keys=keys).slice(query.offset, query.limit))
    return table.num_rows, [
        row for file, place in zip(page["_file"].to_pylist(), page["_row"].to_pylist(), strict=True)
        for row in _row(files[file], place)
    ]  # fmt: skip


def _newest(files: list[Path], offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """The page of all samples in their usual order, for which only the files that it shows are read."""
    total = 0
    page: list[dict[str, Any]] = []
    for file in files:
        try:
            stat = file.stat()
            count = _rows_in(file, stat.st_mtime_ns, stat.st_size)
        except (OSError, pa.ArrowException):  # gone: the run went back to an earlier step
            continue
        skip = max(0, offset - total)
        if skip < count and len(page) < limit:
            table = _read(file, (*_SHOWN, *_COSTS))
            if table is not None:
                page += table.sort_by("sample_id").slice(skip, limit - len(page)).to_pylist()
        total += count
    return total, page


@lru_cache(maxsize=1 << 16)
def _rows_in(file: Path, _changed_ns: int, _size: int) -> int:
    """Rows of a file, which is not written any more once it has its name; the rest tells it from a later one."""
    return int(pq.read_metadata(file).num_rows)


def _filter(table: pa.Table, query: RolloutQuery) -> pa.Table:
    conditions = []
    for name in ("group_id", "trace_id", "finish_reason"):
        if (value := getattr(query, name)) is not None:
            conditions.append(pc.field(name) == value)
    if query.min_reward is not None:
        conditions.append(pc.field("reward") >= query.min_reward)
    if query.max_reward is not None:
        conditions.append(pc.field("reward") <= query.max_reward)
    for condition in conditions:
        table = table.filter(condition)
    return table


def _row(file: Path, place: int) -> list[dict[str, Any]]:
    table = _read(file, (*_SHOWN, *_COSTS))
    return table.slice(place, 1).to_pylist() if table is not None else []


def _read(file: Path, columns: tuple[str, ...]) -> pa.Table | None:
    try:
        with pq.ParquetFile(file) as opened:
            present = set(opened.schema_arrow.names)
            return opened.read(columns=[name for name in columns if name in present], use_threads=False)
    except (OSError, pa.ArrowException):  # gone: the run went back to an earlier step
        return None


def metrics(
    path: Path, *, kind: str | None, names: frozenset[str], after: int | None, before: int | None, most: int
) -> list[dict[str, Any]]:
    """Points of ``metrics.jsonl``; of more than ``most``, evenly chosen ones with the last among them."""
    found = []
    for line in _lines(path):
        if kind is not None and line.get("kind") != kind:
            continue
        step = line.get("step")
        if not isinstance(step, int) or (after is not None and step <= after) or (before is not None and step > before):
            continue
        values: dict[str, Any] = line.get("metrics") or {}
        if names:
            values = {name: value for name, value in values.items() if name in names}
        found.append({"step": step, "kind": line.get("kind"), "time": line.get("time") or 0.0, "metrics": values})
    if len(found) > most:
        stride = (len(found) - 1) / max(1, most - 1)
        found = [found[round(at * stride)] for at in range(most)] if most > 1 else found[-1:]
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for text in file:
                if text.endswith(b"\n"):  # the last line may be half written
                    try:
                        line = json.loads(text)
                    except ValueError:
                        continue
                    if isinstance(line, dict):
                        yield line
    except FileNotFoundError:
        return


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One HF checkpoint."""

    step: int
    folder: Path
    time: float
    policy_version: str | None
    files: dict[str, int] = field(default_factory=dict)


def checkpoint_views(run_dir: Path) -> list[CheckpointView]:
    """The HF checkpoints of a run, oldest first."""
    found = []
    for folder in checkpoints(run_dir, "actor"):
        step = int(folder.name.rpartition("_")[2])
        manifest = run_dir / "checkpoints" / "trainer" / folder.name / "manifest.json"
        try:
            version = json.loads(manifest.read_text()).get("policy_version")
        except (OSError, ValueError):
            version = None
        try:
            files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
            found.append(CheckpointView(step, folder, folder.stat().st_mtime, version, files))
        except FileNotFoundError:  # rotated away a moment ago
            continue
    return found


class Archive:
    """A folder as an uncompressed tar stream of known length.

    All files are opened at once, so that a checkpoint that is rotated away meanwhile is still whole.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._files: list[tuple[tarfile.TarInfo, IO[bytes]]] = []
        try:
            for path in sorted(folder.iterdir()):
                if path.is_file():
                    file = path.open("rb")
                    info = tarfile.TarInfo(f"{name}/{path.name}")
                    info.size, info.mtime, info.mode = path.stat().st_size, int(path.stat().st_mtime), 0o644
                    self._files.append((info, file))
        except OSError:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the stream."""
        bodies = sum(len(info.tobuf(tarfile.PAX_FORMAT)) + -(-info.size // _BLOCK) * _BLOCK for info, _ in self._files)
        return bodies + 2 * _BLOCK

    def chunks(self) -> Iterator[bytes]:
        """The stream, piece by piece."""
        try:
            for info, file in self._files:
                yield info.tobuf(tarfile.PAX_FORMAT)
                left = info.size
                while left:
                    data = file.read(min(_CHUNK, left))
                    if not data:
                        raise OSError(f"{info.name} became shorter while it was read")
                    left -= len(data)
                    yield data
                yield b"\0" * (-info.size % _BLOCK)
            yield b"\0" * (2 * _BLOCK)
        finally:
            self.close()

    def close(self) -> None:
        """Closes the files."""
        for _, file in self._files:
            file.close()


def log_files(run_dir: Path) -> dict[str, Path]:
    """Role -> its log; Ray's workers as ``ray/<name>``."""
    folder = run_dir / "logs"
    found = {}
    for path in sorted([*folder.glob("*.log"), *folder.glob("ray/**/*.log"), *folder.glob("ray/**/*.out")]):
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            found[str(path.relative_to(folder).with_suffix(""))] = path
    return found


def log_tail(path: Path, lines: int, most: int = 4 << 20) -> str:
    """The last lines of a file, of its last ``most`` bytes."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most))
        text = file.read().decode(errors="replace")
    return "".join(text.splitlines(keepends=True)[-lines:])


def mentions(path: Path, word: bytes) -> bool:
    """Whether a file holds a word; read in pieces."""
    try:
        with path.open("rb") as file:
            rest = b""
            while data := file.read(_CHUNK):
                if word in rest + data:
                    return True
                rest = data[-len(word) :]
    except FileNotFoundError:
        pass
    return False
