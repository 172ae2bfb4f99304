"""Prompts of a job: rows of its files, checked, templated and tokenised."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nightshift.config.data import DataConfig
from nightshift.data.cursor import row_prefixes
from nightshift.data.messages import InvalidPromptError, Message, fold_system, has_system, normalise_prompt
from nightshift.data.prompts import ANSWER_COLUMNS, Prompt, PromptSet, Source
from nightshift.data.rows import Row, Table, read_table
from nightshift.data.tokenizer import Tokenizer, template_warnings
from nightshift.wire.errors import BadInputError

Ids = NDArray[np.int32]
_T = TypeVar("_T")
#: Row, prompt, its text, and whether the text came from the chat template.
_Text = tuple[Row, str | list[Message], str, bool]

_ROLE = "job"
_COLUMNS = ("reward_model", *ANSWER_COLUMNS, "data_source", "extra_info")
#: Rows that a message names before it only counts.
_NAMED_ROWS = 5


def load_prompts(config: DataConfig, files: Sequence[str | Path], tokenizer: Tokenizer) -> PromptSet:
    """Reads, checks, templates and tokenises all rows of the files.

    Rows keep their order. What is wrong with a row is collected over the whole file, so that one message names all of
    it.

    Raises:
        BadInputError: no files or rows, a missing prompt column, rows without a usable prompt, a chat template that
            is missing or refuses rows, prompts that are too long; each unless the job says to drop such rows, and also
            when no row is left then.
    """
    if not files:
        raise BadInputError("the list of data files is empty", role=_ROLE)
    tables = [read_table(path, {config.prompt_key, *_COLUMNS}) for path in files]
    loader = _Loader(config, tokenizer)
    names = row_prefixes([table.path for table in tables])
    for name, table in zip(names, tables, strict=True):
        loader.add(name, table)
    result = PromptSet(
        prompts=loader.prompts,
        dropped=loader.dropped,
        cut=loader.cut,
        sources=tuple(_source(table) for table in tables),
        warnings=template_warnings(tokenizer),
    )
    if not result.prompts:
        raise BadInputError(
            f"no prompt is left of {', '.join(repr(table.path) for table in tables)}: {result.summary()}",
            role=_ROLE,
            fix="Give rows with a prompt, or raise data.max_prompt_length" if result.rows else "Give files with rows",
        )
    return result


class _Loader:
    """Turns tables into prompts, counting what is dropped."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self.prompts: list[Prompt] = []
        self.dropped = {"invalid": 0, "template": 0, "overlong": 0}
        self.cut = 0

    def add(self, name: str, table: Table) -> None:
        """Adds the rows of one table. ``name`` is the first part of their row ids."""
        config = self._config
        if not table.rows:
            raise BadInputError(f"data file {table.path!r} has no rows", role=_ROLE)
        if config.prompt_key not in table.columns:
            near = difflib.get_close_matches(config.prompt_key, table.columns, n=1)
            raise BadInputError(
                f"data file {table.path!r} has no column {config.prompt_key!r}; "
                f"its columns are {', '.join(table.columns)}",
                role=_ROLE,
                fix=f"Set data.prompt_key{f', perhaps to {near[0]!r}' if near else ''}",
            )
        usable = self._keep(table, table.rows, "invalid", self._read)
        texts = self._keep(table, usable, "template", self._render)
        raw = [item for item in texts if not item[3]]
        templated = [item for item in texts if item[3]]
        ids: dict[int, Ids] = {}
        for group, flag in ((raw, False), (templated, True)):
            encoded = self._tokenizer.encode_prompts([text for _, _, text, _ in group], templated=flag)
            ids.update((row.number, item) for (row, *_), item in zip(group, encoded, strict=True))
        texts = self._keep(table, texts, "invalid", lambda item: self._check_ids(table, item, ids[item[0].number]))
        sized = self._keep(table, texts, "overlong", lambda item: self._fit(item[0], item[1], ids[item[0].number]))
        self.prompts += [self._prompt(name, row, prompt, prompt_ids) for row, prompt, prompt_ids in sized]

    def _keep(self, table: Table, items: Sequence[Any], cause: str, step: Callable[[Any], _T]) -> list[_T]:
        """Applies a step to each item; those it refuses are dropped and counted, or refused together."""
        kept: list[_T] = []
        refused: list[_Refusal] = []
        for item in items:
            try:
                kept.append(step(item))
            except _Refusal as refusal:
                refused.append(refusal)
        mode = self._config.overlong_prompts if cause == "overlong" else self._config.invalid_rows
        if refused and mode != "drop":
            raise _refuse(table, cause, refused, self._config)
        self.dropped[cause] += len(refused)
        return kept

    def _read(self, row: Row) -> tuple[Row, str | list[Message]]:
        try:
            return row, normalise_prompt(row.values.get(self._config.prompt_key))
        except InvalidPromptError as error:
            raise _Refusal(row, str(error)) from error

    def _render(self, item: tuple[Row, str | list[Message]]) -> _Text:
        row, prompt = item
        if isinstance(prompt, str):
            if not self._config.apply_chat_template:
                return row, prompt, prompt, False
            messages: list[Message] = [{"role": "user", "content": prompt}]
        else:
            messages = prompt
        if self._tokenizer.chat_template is None:
            # Wrong for the whole job, whatever is to happen to single rows.
            raise BadInputError(
                f"the tokenizer in {str(self._tokenizer.folder)!r} has no chat_template, which the prompts need",
                role=_ROLE,
                fix="Name one in data.chat_template (chatml, qwen, llama3, phi3, or the path of a Jinja file)"
                + (", or set data.apply_chat_template to false" if isinstance(prompt, str) else ""),
            )
        try:
            return row, prompt, self._tokenizer.prompt_text(messages), True
        except BadInputError as error:
            system = has_system(messages)
            if not (system and self._config.system_role == "fold"):
                raise _Refusal(row, error.message, system=system) from error
        try:
            return row, prompt, self._tokenizer.prompt_text(fold_system(messages)), True
        except (BadInputError, InvalidPromptError) as error:
            raise _Refusal(row, getattr(error, "message", str(error))) from error

    def _check_ids(self, table: Table, item: _Text, ids: Ids) -> _Text:
        if not len(ids):
            raise _Refusal(item[0], "no tokens")
        self._tokenizer.check_ids(ids, f"data file {table.path!r}, row {item[0].number}")
        return item

    def _fit(self, row: Row, prompt: str | list[Message], ids: Ids) -> tuple[Row, str | list[Message], Ids]:
        limit = self._config.max_prompt_length
        if len(ids) <= limit:
            return row, prompt, ids
        if self._config.overlong_prompts == "left":
            self.cut += 1
            return row, prompt, ids[-limit:].copy()
        raise _Refusal(row, f"{len(ids)} tokens")

    def _prompt(self, name: str, row: Row, prompt: str | list[Message], ids: Ids) -> Prompt:
        source = row.values.get("data_source")
        return Prompt(
            row_id=f"{name}:{row.number}",
            prompt=prompt,
            prompt_ids=ids,
            ground_truth=_ground_truth(row.values),
            data_source=None if source is None else str(source),
            extra_info=row.values.get("extra_info"),
        )


class _Refusal(Exception):
    """A row cannot be used."""

    def __init__(self, row: Row, reason: str, *, system: bool = False) -> None:
        super().__init__(reason)
        self.row, self.reason, self.system = row, reason, system


def _refuse(table: Table, cause: str, refused: Sequence[_Refusal], config: DataConfig) -> BadInputError:
    named = "; ".join(f"row {item.row.number}: {item.reason}" for item in refused[:_NAMED_ROWS])
    more = f"; and {len(refused) - _NAMED_ROWS} more" if len(refused) > _NAMED_ROWS else ""
    what, fix = {
        "invalid": (
            f"have no usable prompt in column {config.prompt_key!r}",
            "Correct them, or set data.invalid_rows to drop",
        ),
        "template": ("are refused by the chat_template", "Correct them, or set data.invalid_rows to drop"),
        "overlong": (
            f"are longer than data.max_prompt_length {config.max_prompt_length}",
            "Raise it, or set data.overlong_prompts to drop or left",
        ),
    }[cause]
    if cause == "template" and any(item.system for item in refused) and config.system_role == "error":
        fix = "Set data.system_role to fold to put system text into the user turn, or correct the rows"
    count = f"{len(refused)} of {len(table.rows)} rows"
    return BadInputError(f"data file {table.path!r}: {count} {what}: {named}{more}", role=_ROLE, fix=fix)


def _ground_truth(values: Mapping[str, Any]) -> Any:
    nested = values.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return next((values[name] for name in ANSWER_COLUMNS if name in values), None)


def _source(table: Table) -> Source:
    provides = set()
    for row in table.rows:
        nested = row.values.get("reward_model")
        if (isinstance(nested, Mapping) and "ground_truth" in nested) or any(
            name in row.values for name in ANSWER_COLUMNS
        ):
            provides.add("ground_truth")
        provides.update(name for name in ("data_source", "extra_info") if name in row.values)
    return Source(table.path, table.columns, len(table.rows), frozenset(provides))
