"""The prompts of a job as they are used, and checks that look at all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nightshift.data.cursor import file_weights
from nightshift.data.messages import Message
from nightshift.data.tokenizer import Tokenizer
from nightshift.wire.errors import BadInputError

Ids = NDArray[np.int32]

_ROLE = "job"
#: Columns that hold the right answer where there is no ``reward_model.ground_truth``, in the order they are looked at.
ANSWER_COLUMNS = ("ground_truth", "answer")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        row_id: "<file name>:<row number>", unique in its set.
        prompt: as it goes to rewards: the text, or the message list with content parts joined.
        prompt_ids: [P] int32, exactly what the rollout server gets and the trainer sees.
        ground_truth: ``reward_model.ground_truth``, else the column ``ground_truth``, else ``answer``; None without.
        data_source: name of the row's data set, None without.
        extra_info: whatever the row holds there, None without.
    """

    row_id: str
    prompt: str | list[Message]
    prompt_ids: Ids
    ground_truth: Any
    data_source: str | None
    extra_info: Any


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a set.

    Attributes:
        path: as the job names it.
        columns: the columns it has.
        rows: its number of rows, dropped ones included.
        provides: which of ground_truth, data_source and extra_info at least one row has.
    """

    path: str
    columns: tuple[str, ...]
    rows: int
    provides: frozenset[str]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The usable prompts of a list of files, in the order of the files and their rows.

    Attributes:
        prompts: what is left after dropping.
        dropped: rows left out, by cause: "invalid" (no usable prompt), "template" (the chat template refused it),
            "overlong" (longer than ``data.max_prompt_length``).
        cut: prompts that were cut to their last ``data.max_prompt_length`` tokens.
        sources: the files.
        warnings: sentences for the user.
    """

    prompts: list[Prompt]
    dropped: dict[str, int]
    cut: int
    sources: tuple[Source, ...]
    warnings: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def rows(self) -> int:
        """Rows of all files, dropped ones included."""
        return sum(source.rows for source in self.sources)

    def parts(self, weights: Sequence[float] | None) -> list[tuple[int, float]] | None:
        """Prompts and weight of each file, for the cursor; None where files have no weights."""
        paths = [source.path for source in self.sources]
        return file_weights((prompt.row_id for prompt in self.prompts), paths, weights)

    def summary(self) -> str:
        """One line: how many prompts, and what was dropped or cut."""
        parts = [f"{len(self.prompts)} prompts of {self.rows} rows"]
        parts += [f"{count} dropped ({cause})" for cause, count in self.dropped.items() if count]
        if self.cut:
            parts.append(f"{self.cut} cut to their last tokens")
        return ", ".join(parts)


def require_columns(prompts: PromptSet, needed: Collection[str]) -> None:
    """Checks that the files have what the rewards read.

    Args:
        prompts: the loaded set.
        needed: any of ground_truth, data_source, extra_info; other names are passed over.

    Raises:
        BadInputError: a file has none of it in any row; the message names the column, the file and its columns.
    """
    for source in prompts.sources:
        for name in ("ground_truth", "data_source", "extra_info"):
            if name in needed and name not in source.provides:
                column = "reward_model" if name == "ground_truth" else name
                detail = " with a ground_truth" if column in source.columns else ""
                others = f" (or {' or '.join(ANSWER_COLUMNS)})" if name == "ground_truth" else ""
                raise BadInputError(
                    f"{source.path!r} has no column {column!r}{detail}{others}, which a reward reads as {name}; "
                    f"its columns are {', '.join(source.columns)}",
                    role=_ROLE,
                    fix="Add the column, or take the parameter out of the reward function",
                )


def require_rewards(prompts: PromptSet, sources: Collection[Collection[str] | None]) -> None:
    """Checks that some reward scores each prompt.

    Args:
        sources: ``data_sources`` of each reward; None scores all.

    Raises:
        BadInputError: names the data source that no reward scores.
    """
    if not sources or any(chosen is None for chosen in sources):
        return
    known = {name for chosen in sources for name in chosen or ()}
    for prompt in prompts.prompts:
        if prompt.data_source not in known:
            raise BadInputError(
                f"row {prompt.row_id} has data_source {prompt.data_source!r}, which no reward scores; they score "
                f"{', '.join(sorted(known))}",
                role=_ROLE,
                fix="Add it to rewards[].data_sources, or leave that key out of one reward",
            )


def check_context(
    tokenizer: Tokenizer, max_prompt_length: int, max_response_length: int, max_model_len: int | None = None
) -> None:
    """Checks that the longest prompt and the longest response fit into the model together.

    Raises:
        BadInputError: they do not; the message has the three numbers.
    """
    total = max_prompt_length + max_response_length
    for limit, name in ((tokenizer.max_positions, "the model's positions"), (max_model_len, "rollout.max_model_len")):
        if limit is not None and total > limit:
            raise BadInputError(
                f"data.max_prompt_length {max_prompt_length} and rollout.max_response_length {max_response_length} "
                f"together are {total} tokens, more than {name} ({limit})",
                role=_ROLE,
                fix=f"Lower them to {limit} in sum",
            )
