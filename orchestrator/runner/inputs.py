"""What a job trains on, and for how many steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nightshift.algorithms.custom import load_custom
from nightshift.config import JobSpec
from nightshift.data import Cursor, Prompt, PromptSet, Tokenizer, load_prompts
from nightshift.data.curriculum import epoch_keys
from nightshift.data.source import row_prefixes


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
    return Inputs(tokenizer, train, test, spec.steps_for(len(train.prompts)))


def make_cursor(spec: JobSpec, train: PromptSet) -> Cursor:
    """The walk over the prompts, with the weights of the files and the user's order.

    Raises:
        BadInputError: weights or order do not fit the prompts.
    """
    weights, curriculum = spec.data.weights, spec.data.curriculum
    kept = Counter(prompt.row_id.rpartition(":")[0] for prompt in train.prompts)
    parts = None
    if weights is not None:
        # Files in the order of their rows; one of which nothing was kept has no place in it.
        names = row_prefixes([source.path for source in train.sources])
        parts = [(kept[name], weight) for name, weight in zip(names, weights, strict=True) if kept[name]]
    keys = None
    if curriculum is not None:
        keys = epoch_keys(load_custom(curriculum, "data.curriculum"), curriculum, train.prompts)
    return Cursor(len(train.prompts), spec.trainer.seed, spec.data.shuffle, parts=parts, keys=keys)


def steps_sentence(prompts: int, batch: int, steps: int) -> str:
    """How many steps there are, and what becomes of prompts that fill no batch."""
    full, rest = divmod(prompts, batch)
    text = f"{steps} steps of {batch} prompts, {full} full ones an epoch"
    if not rest:
        return text
    unused = -(-steps * batch // prompts) * prompts - steps * batch
    left_out = f", {unused} left out of the last epoch" if unused else ""
    return f"{text} and {rest} carried over into the next{left_out}"
