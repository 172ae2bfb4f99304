"""Section ``data``: prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nightshift.config.base import Section


class DataConfig(Section):
    """Where prompts come from and how they become token ids."""

    train_files: list[str] = Field(min_length=1)
    """Parquet or JSONL files, or HF ``datasets`` folders. Paths are relative to the job file."""

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
