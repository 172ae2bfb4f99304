"""The data of a job, read as the runner will read it, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from nightshift.algorithms import check_estimator
from nightshift.config import JobSpec
from nightshift.config.files import reward_reads
from nightshift.data import PromptSet, Tokenizer, check_context, load_prompts, require_columns, require_rewards
from nightshift.data.cursor import epoch_rows
from nightshift.data.preferences import load_pairs


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompts of one kind of file, in tokens."""

    prompts: int
    shortest: int
    mean: float
    p95: int
    longest: int
    summary: str

    @classmethod
    def of(cls, lengths: list[int], summary: str) -> Lengths:
        """Statistics of prompt lengths, of which there is at least one."""
        ordered = sorted(lengths)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return cls(len(ordered), ordered[0], sum(ordered) / len(ordered), p95, ordered[-1], summary)

    @property
    def sentence(self) -> str:
        """The statistics as one line."""
        return f"{self.summary}; {self.shortest} to {self.longest} tokens each (mean {self.mean:.1f})"


@dataclass(frozen=True, slots=True)
class DataCheck:
    """What the data holds."""

    train: Lengths
    test: Lengths | None
    total_steps: int
    warnings: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The data as lines of text."""
        test = f"held out: {self.test.sentence}" if self.test else "held out: no prompts, so no evaluation"
        return [f"train: {self.train.sentence}; {self.total_steps} steps", test, *self.warnings]


def check_data(spec: JobSpec) -> DataCheck:
    """Reads and tokenises all prompts. ``spec.model.path`` is a local folder by now.

    Raises:
        BadInputError: a file, a row or the tokenizer is wrong; too little is left; prompt and response together are
            longer than the model's context; or a reward reads what the rows do not have.
    """
    tokenizer = Tokenizer.load(spec.model.tokenizer or spec.model.path, spec.data.chat_template, model=spec.model.path)
    if spec.is_preference:
        return _check_pairs(spec, tokenizer)
    check_estimator(
        spec.algorithm.estimator,
        has_critic=spec.scorers.critic is not None,
        has_teacher=spec.scorers.teacher is not None,
    )
    rollout = spec.rollout
    check_context(tokenizer, spec.data.max_prompt_length, rollout.max_response_length, rollout.max_model_len)
    needed = reward_reads(spec)
    train = load_prompts(spec.data, spec.data.train_files, tokenizer)
    require_columns(train, needed)
    sources = [reward.data_sources for reward in spec.rewards]
    require_rewards(train, sources)
    test = load_prompts(spec.data, spec.data.test_files, tokenizer) if spec.data.test_files else None
    if test is not None:
        require_columns(test, needed)
        require_rewards(test, sources)
    steps = spec.steps_for(epoch_rows(len(train), train.parts(spec.data.weights)))
    return DataCheck(_lengths(train), _lengths(test) if test is not None else None, steps, train.warnings)


def _check_pairs(spec: JobSpec, tokenizer: Tokenizer) -> DataCheck:
    longest = spec.rollout.max_response_length
    check_context(tokenizer, spec.data.max_prompt_length, longest, None)
    sets = [
        load_pairs(spec.data, files, tokenizer, longest)
        for files in (spec.data.train_files, spec.data.test_files)
        if files
    ]
    train, *test = [Lengths.of([len(pair.prompt_ids) for pair in found.pairs], found.summary()) for found in sets]
    steps = spec.steps_for(epoch_rows(len(sets[0]), sets[0].parts(spec.data.weights)))
    return DataCheck(train, test[0] if test else None, steps, sets[0].warnings)


def _lengths(prompts: PromptSet) -> Lengths:
    return Lengths.of([len(prompt.prompt_ids) for prompt in prompts.prompts], prompts.summary())
