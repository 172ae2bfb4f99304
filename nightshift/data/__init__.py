"""Prompts: data files, chat templates, tokenisation and the resumable cursor; no torch, transformers or datasets."""

from nightshift.data.cursor import Cursor
from nightshift.data.prompts import Prompt, PromptSet, check_context, require_columns, require_rewards
from nightshift.data.source import load_prompts
from nightshift.data.tokenizer import Tokenizer

__all__ = [
    "Cursor",
    "Prompt",
    "PromptSet",
    "Tokenizer",
    "check_context",
    "load_prompts",
    "require_columns",
    "require_rewards",
]
