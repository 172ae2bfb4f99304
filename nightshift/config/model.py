"""Section ``model``: the policy."""

from __future__ import annotations

from typing import Literal

from nightshift.config.base import Section

DType = Literal["float32", "bfloat16"]


class ModelConfig(Section):
    """The policy that is trained; also the reference unless ``scorers.reference`` names another model."""

    path: str
    """HF id, local folder, or ``builtin:smollm2-135m-instruct`` (made once from the installed package and cached)."""

    tokenizer: str | None = None
    """Folder or id of the tokenizer where it is not in the model's folder."""

    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    """Attention of the trainer and the reference."""
