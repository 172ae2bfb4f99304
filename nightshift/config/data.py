"""Section ``data``: prompts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from nightshift.config.base import Section


class DataConfig(Section):
    """Where prompts come from and how they become token ids."""

    train_files: list[str] = Field(min_length=1)
    """Parquet or JSONL files, or HF ``datasets`` folders. Paths are relative to the job file."""

    weights: list[float] | None = None
    """How often an epoch holds the rows of each train file: 2 is twice, 0.5 every other row; null: each row once."""

    curriculum: str | None = None
    """``path.py:function`` or ``package.module.function`` of (prompts, epoch) that returns one number per prompt: in
    each epoch those with lower numbers come first; null: no such order."""

    test_files: list[str] = Field(default_factory=list)
    """Held-out prompts for the evaluation; empty: no evaluation."""

    prompt_key: str = "prompt"
    """Column of the prompt: text, a message list, or a message list with content parts."""

    max_prompt_length: int = Field(default=1024, ge=1)
    """Longest prompt in tokens, after the chat template."""

    overlong_prompts: Literal["error", "drop", "left"] = "error"
    """What happens to a longer prompt: refuse the job, leave the row out (counted), or keep the last tokens."""

    invalid_rows: Literal["error", "drop"] = "error"
    """What happens to a row without a usable prompt: refuse the job, or leave the row out (counted)."""

    apply_chat_template: bool = True
    """Text prompts become one user turn of the chat template; false: they are tokenised as they stand."""

    add_eos_token: bool = True
    """Answers of preference data end with the model's end-of-sequence id."""

    chat_template: str | None = None
    """Built-in name (chatml, qwen, llama3, phi3) or path of a Jinja file; null: the tokenizer's own."""

    system_role: Literal["error", "fold"] = "error"
    """For templates that refuse a system turn: refuse the job, or fold its text into the first user turn."""

    shuffle: bool = True
    """A new order in each epoch, fixed by ``trainer.seed``."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights is not None:
            if len(self.weights) != len(self.train_files):
                raise ValueError(
                    f"data.weights has {len(self.weights)} numbers for {len(self.train_files)} data.train_files"
                )
            if any(weight < 0 for weight in self.weights) or not any(self.weights):
                raise ValueError("data.weights must be 0 or more, and one of them above 0")
        return self
