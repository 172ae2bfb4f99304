"""Preference data of other projects' forms as one parquet file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nightshift.data.messages import InvalidPromptError
from nightshift.data.preferences import CHOSEN, REJECTED, split_conversations
from nightshift.data.rows import read_table
from nightshift.wire.errors import BadInputError

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_SCHEMA = pa.schema([("prompt", pa.list_(_MESSAGE)), (CHOSEN, pa.string()), (REJECTED, pa.string())])


def convert_preferences(source: Path, target: Path, prompt_key: str = "prompt") -> int:
    """Writes rows of ``prompt`` (a list of messages), ``chosen`` and ``rejected`` (texts); returns their number.

    The file appears by rename.

    Raises:
        BadInputError: the source cannot be read, a row is no pair (named by its number), or the target exists.
    """
    if target.exists():
        raise BadInputError(f"{str(target)!r} exists already", role="job", fix="Remove it, or name another file")
    if target.suffix != ".parquet":
        raise BadInputError(f"{str(target)!r} is no parquet file", role="job", fix="Give a name that ends in .parquet")
    rows = []
    for row in read_table(source, {prompt_key, CHOSEN, REJECTED}).rows:
        try:
            prompt, chosen, rejected = split_conversations(
                row.values.get(CHOSEN), row.values.get(REJECTED), row.values.get(prompt_key)
            )
        except InvalidPromptError as error:
            raise BadInputError(
                f"{str(source)!r}, row {row.number} is no preference pair: {error}", role="job", fix="Correct it"
            ) from error
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [{"role": turn["role"], "content": turn.get("content", "")} for turn in messages]
        rows.append({"prompt": turns, CHOSEN: chosen, REJECTED: rejected})
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), part)
    part.replace(target)
    return len(rows)
