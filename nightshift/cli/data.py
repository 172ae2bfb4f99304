"""The data of a job, read as the runner will read it, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nightshift.config import JobSpec
from nightshift.config.files import reward_reads
from nightshift.wire.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompts of one kind of file, in tokens."""

    prompts: int
    shortest: int
    mean: float
    p95: int
    longest: int
    dropped: dict[str, int]

    @classmethod
    def of(cls, lengths: list[int], dropped: dict[str, int]) -> Lengths:
        """Statistics of prompt lengths, of which there is at least one."""
        ordered = sorted(lengths)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return cls(len(ordered), ordered[0], sum(ordered) / len(ordered), p95, ordered[-1], dropped)

    @property
    def sentence(self) -> str:
        """The statistics as one line."""
        text = f"{self.prompts} prompts of {self.shortest} to {self.longest} tokens (mean {self.mean:.1f})"
        left_out = [f"{count} dropped ({reason})" for reason, count in self.dropped.items() if count]
        return ", ".join([text, *left_out])


@dataclass(frozen=True, slots=True)
class DataCheck:
    """What the data holds."""

    train: Lengths
    test: Lengths | None
    steps_per_epoch: int
    total_steps: int

    @property
    def sentence(self) -> str:
        """The data as one line."""
        test = f"; held out: {self.test.sentence}" if self.test else "; no held-out prompts, so no evaluation"
        return f"data: {self.train.sentence}{test}; {self.steps_per_epoch} steps an epoch, {self.total_steps} in all"


def check_data(spec: JobSpec) -> DataCheck:
    """Reads and tokenises all prompts. ``spec.model.path`` is a local folder by now.

    Raises:
        BadInputError: a file, a row or the tokenizer is wrong; nothing is left after dropping; or prompt and response
            together are longer than the model's context.
    """
    from nightshift.data import Tokenizer, load_prompts

    tokenizer = Tokenizer.load(spec.model.tokenizer or spec.model.path, spec.data.chat_template)
    check_context(spec, tokenizer.max_positions)
    train = load_prompts(spec.data, spec.data.train_files, tokenizer)
    check_ground_truth(spec, train.prompts)
    if len(train.prompts) < spec.rollout.batch_size:
        raise BadInputError(
            f"data.train_files hold {len(train.prompts)} usable prompts, fewer than rollout.batch_size "
            f"{spec.rollout.batch_size}",
            role="data",
            fix="Give more prompts, or a smaller rollout.batch_size",
        )
    test = load_prompts(spec.data, spec.data.test_files, tokenizer) if spec.data.test_files else None
    steps = len(train.prompts) // spec.rollout.batch_size
    return DataCheck(
        train=_lengths(train),
        test=_lengths(test) if test is not None else None,
        steps_per_epoch=steps,
        total_steps=spec.trainer.total_steps or steps * spec.trainer.total_epochs,
    )


def check_context(spec: JobSpec, positions: int | None) -> None:
    """Checks that the longest prompt and the longest response fit into the model's and the server's context.

    Raises:
        BadInputError: names both limits.
    """
    longest = spec.data.max_prompt_length + spec.rollout.max_response_length
    sums = f"data.max_prompt_length {spec.data.max_prompt_length} + rollout.max_response_length"
    for limit, name in ((positions, "the model has"), (spec.rollout.max_model_len, "rollout.max_model_len is")):
        if limit is not None and longest > limit:
            raise BadInputError(
                f"{sums} {spec.rollout.max_response_length} is {longest} tokens, but {name} {limit}",
                role="data",
                fix="Make one of the two shorter",
            )


def check_ground_truth(spec: JobSpec, prompts: list[Any]) -> None:
    """Checks that a reward that reads ``ground_truth`` gets one.

    Raises:
        BadInputError: no row at all has one.
    """
    if all(prompt.ground_truth is None for prompt in prompts) and reward_reads(spec, "ground_truth"):
        raise BadInputError(
            "the reward function reads 'ground_truth', but no row of data.train_files has one ('reward_model' with the "
            "key 'ground_truth', or a column 'ground_truth')",
            role="data",
            fix="Add it to the rows, or give the parameter a default value",
        )


def _lengths(prompts: Any) -> Lengths:
    return Lengths.of([len(prompt.prompt_ids) for prompt in prompts.prompts], dict(prompts.dropped))
