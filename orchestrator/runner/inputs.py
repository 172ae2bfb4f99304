"""What a job trains on, and for how many steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nightshift.algorithms.custom import load_custom
from nightshift.config import JobSpec
from nightshift.data import Cursor, Prompt, PromptSet, Tokenizer, load_prompts
from nightshift.data.curriculum import epoch_keys
from nightshift.data.cursor import epoch_rows
from nightshift.data.preferences import Pair, PairSet


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tokenizer, prompts for training and for evaluation, and the number of steps."""

    tokenizer: Tokenizer
    train: PromptSet
    test: list[Prompt]
    total_steps: int


def load_inputs(spec: JobSpec) -> Inputs:
    """Reads the data of a job.

    Raises:
        BadInputError: the data cannot be used.
    """
    tokenizer = Tokenizer.load(spec.model.tokenizer or spec.model.path, spec.data.chat_template, model=spec.model.path)
    train = load_prompts(spec.data, spec.data.train_files, tokenizer)
    test = load_prompts(spec.data, spec.data.test_files, tokenizer).prompts if spec.data.test_files else []
    return Inputs(tokenizer, train, test, spec.steps_for(rows_per_epoch(spec, train)))


def make_cursor(spec: JobSpec, train: PromptSet | PairSet) -> Cursor:
    """The walk over prompts or pairs, with the weights of the files and the user's order.

    Raises:
        BadInputError: weights or order do not fit the rows.
    """
    curriculum = spec.data.curriculum
    rows: Sequence[Prompt] | Sequence[Pair] = train.prompts if isinstance(train, PromptSet) else train.pairs
    keys = None
    if curriculum is not None:
        keys = epoch_keys(load_custom(curriculum, "data.curriculum"), curriculum, rows)
    return Cursor(len(rows), spec.trainer.seed, spec.data.shuffle, parts=train.parts(spec.data.weights), keys=keys)


def rows_per_epoch(spec: JobSpec, train: PromptSet | PairSet) -> int:
    """Rows that an epoch of the walk holds, under the weights of the files."""
    return epoch_rows(len(train), train.parts(spec.data.weights))


def steps_sentence(prompts: int, batch: int, steps: int) -> str:
    """How many steps there are, and what becomes of prompts that fill no batch."""
    full, rest = divmod(prompts, batch)
    text = f"{steps} steps of {batch} prompts, {full} full ones an epoch"
    if not rest:
        return text
    unused = -(-steps * batch // prompts) * prompts - steps * batch
    left_out = f", {unused} left out of the last epoch" if unused else ""
    return f"{text} and {rest} carried over into the next{left_out}"
