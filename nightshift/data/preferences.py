"""Preference pairs: one prompt, a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.config.data import DataConfig
from nightshift.data.cursor import file_weights, row_prefixes
from nightshift.data.messages import InvalidPromptError, Message, fold_system, has_system, normalise_prompt
from nightshift.data.rows import Row, Table, read_table
from nightshift.data.tokenizer import Tokenizer, template_warnings
from nightshift.wire.errors import BadInputError

Ids = NDArray[np.int32]

_ROLE = "job"
CHOSEN, REJECTED = "chosen", "rejected"
#: Rows that a message names before it only counts.
_NAMED_ROWS = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt and two responses to it.

    Attributes:
        row_id: "<file name>:<row number>".
        prompt: the text, or the message list.
        prompt_ids: [P] int32.
        chosen_ids, rejected_ids: [T] int32, closed by the end-of-sequence id under ``data.add_eos_token``.
        chosen, rejected: their texts.
    """

    row_id: str
    prompt: str | list[Message]
    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class PairSet:
    """The usable pairs of a list of files, in the order of the files and their rows.

    Attributes:
        dropped: rows left out, by cause: "invalid" or "overlong".
        rows: of all files, dropped ones included.
        paths: of the files.
        cut: pairs whose prompt was cut to its last ``data.max_prompt_length`` tokens.
        warnings: sentences for the user.
    """

    pairs: list[Pair]
    dropped: dict[str, int]
    rows: int
    paths: tuple[str, ...] = ()
    cut: int = 0
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def parts(self, weights: Sequence[float] | None) -> list[tuple[int, float]] | None:
        """Pairs and weight of each file, for the cursor; None where files have no weights."""
        return file_weights((pair.row_id for pair in self.pairs), self.paths, weights)

    def summary(self) -> str:
        """One line: how many pairs, and what was dropped."""
        parts = [f"{len(self.pairs)} pairs of {self.rows} rows"]
        parts += [f"{count} dropped ({cause})" for cause, count in self.dropped.items() if count]
        if self.cut:
            parts.append(f"{self.cut} cut to the last tokens of their prompts")
        return ", ".join(parts)


def load_pairs(
    config: DataConfig, files: Sequence[str | Path], tokenizer: Tokenizer, max_response_length: int
) -> PairSet:
    """Reads, checks, templates and tokenises all rows of the files.

    A row has ``chosen`` and ``rejected``, each the text of an answer, or a list of messages whose last one is the
    answer. The prompt stands in ``data.prompt_key``, or is what both conversations begin with.

    Raises:
        BadInputError: no rows, missing columns, rows that are no pairs or too long; each unless the job says to drop
            such rows, and also when no row is left then.
    """
    pairs: list[Pair] = []
    dropped = {"invalid": 0, "overlong": 0}
    rows = cut = 0
    tables = [read_table(path, {config.prompt_key, CHOSEN, REJECTED}) for path in files]
    paths = tuple(table.path for table in tables)
    for name, table in zip(row_prefixes(paths), tables, strict=True):
        _check_columns(table)
        rows += len(table.rows)
        refused: dict[str, list[tuple[int, str]]] = {"invalid": [], "overlong": []}
        for row in table.rows:
            try:
                pair = _pair(name, row, config, tokenizer)
            except InvalidPromptError as error:
                refused["invalid"].append((row.number, str(error)))
                continue
            _check_vocabulary(table, row, pair, tokenizer)
            if config.overlong_prompts == "left" and len(pair.prompt_ids) > config.max_prompt_length:
                pair = replace(pair, prompt_ids=pair.prompt_ids[-config.max_prompt_length :].copy())
                cut += 1
            longest = max(len(pair.chosen_ids), len(pair.rejected_ids))
            if len(pair.prompt_ids) > config.max_prompt_length or longest > max_response_length:
                refused["overlong"].append((row.number, f"{len(pair.prompt_ids)} + {longest} tokens"))
                continue
            pairs.append(pair)
        for cause, found in refused.items():
            drop = config.invalid_rows == "drop" if cause == "invalid" else config.overlong_prompts == "drop"
            if found and not drop:
                raise _refuse(table, cause, found, config, max_response_length)
            dropped[cause] += len(found)
    if not pairs:
        raise BadInputError(
            f"no preference pair is left of {', '.join(repr(str(path)) for path in files)}",
            role=_ROLE,
            fix="Give rows with prompt, chosen and rejected",
        )
    return PairSet(pairs, dropped, rows, paths, cut, template_warnings(tokenizer))


def split_conversations(chosen: Any, rejected: Any, prompt: Any = None) -> tuple[str | list[Message], str, str]:
    """Prompt and the two answers of a row.

    Raises:
        InvalidPromptError: an answer is absent or empty, both are the same, or conversations without a prompt do not
            begin alike.
    """
    heads: list[list[Message]] = []
    answers: list[str] = []
    for name, value in ((CHOSEN, chosen), (REJECTED, rejected)):
        if isinstance(value, str):
            if not value:
                raise InvalidPromptError(f"{name} is empty")
            answers.append(value)
            heads.append([])
            continue
        try:
            messages = normalise_prompt(value)
        except InvalidPromptError as error:
            raise InvalidPromptError(f"{name} is {error}") from error
        last = messages[-1]
        if isinstance(last, str) or last["role"] != "assistant":
            raise InvalidPromptError(f"{name} does not end with a turn of the assistant")
        if not last.get("content"):
            raise InvalidPromptError(f"{name} is empty")
        answers.append(last["content"])
        heads.append([turn for turn in messages[:-1] if isinstance(turn, dict)])
    if answers[0] == answers[1]:
        raise InvalidPromptError("chosen and rejected are the same")
    if prompt is not None:
        return normalise_prompt(prompt), answers[0], answers[1]
    if not heads[0]:
        raise InvalidPromptError("it has no prompt")
    if heads[0] != heads[1]:
        raise InvalidPromptError("chosen and rejected begin with different conversations")
    return heads[0], answers[0], answers[1]


def _pair(name: str, row: Row, config: DataConfig, tokenizer: Tokenizer) -> Pair:
    values: Mapping[str, Any] = row.values
    prompt, chosen, rejected = split_conversations(
        values.get(CHOSEN), values.get(REJECTED), values.get(config.prompt_key)
    )
    try:
        prompt_ids = tokenizer.encode_prompt(prompt, config.apply_chat_template)
    except BadInputError as error:
        if tokenizer.chat_template is None:
            raise
        if isinstance(prompt, str) or not has_system(prompt) or config.system_role != "fold":
            raise InvalidPromptError(error.message) from error
        try:
            prompt_ids = tokenizer.encode_prompt(fold_system(prompt))
        except BadInputError as again:
            raise InvalidPromptError(again.message) from again
    ends = [tokenizer.end_id] if config.add_eos_token and tokenizer.end_id is not None else []
    answers = [
        np.array([*tokenizer.encode(text, add_special_tokens=False).tolist(), *ends], np.int32)
        for text in (chosen, rejected)
    ]
    if not len(prompt_ids):
        raise InvalidPromptError("no tokens")
    return Pair(f"{name}:{row.number}", prompt, prompt_ids, answers[0], answers[1], chosen, rejected)


def _check_vocabulary(table: Table, row: Row, pair: Pair, tokenizer: Tokenizer) -> None:
    for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
        if len(ids):
            tokenizer.check_ids(ids, f"data file {table.path!r}, row {row.number}")


def _check_columns(table: Table) -> None:
    if not table.rows:
        raise BadInputError(f"data file {table.path!r} has no rows", role=_ROLE)
    for name in (CHOSEN, REJECTED):
        if name not in table.columns:
            raise BadInputError(
                f"data file {table.path!r} has no column {name!r}, which preference data needs; "
                f"its columns are {', '.join(table.columns)}",
                role=_ROLE,
                fix="Give rows with prompt, chosen and rejected",
            )


def _refuse(
    table: Table, cause: str, found: Sequence[tuple[int, str]], config: DataConfig, max_response_length: int
) -> BadInputError:
    named = "; ".join(f"row {number}: {reason}" for number, reason in found[:_NAMED_ROWS])
    more = f"; and {len(found) - _NAMED_ROWS} more" if len(found) > _NAMED_ROWS else ""
    what, fix = {
        "invalid": ("are no preference pairs", "Correct them, or set data.invalid_rows to drop"),
        "overlong": (
            f"are longer than data.max_prompt_length {config.max_prompt_length} or rollout.max_response_length "
            f"{max_response_length}",
            "Raise them, or set data.overlong_prompts to drop",
        ),
    }[cause]
    return BadInputError(
        f"data file {table.path!r}: {len(found)} of {len(table.rows)} rows {what}: {named}{more}", role=_ROLE, fix=fix
    )
