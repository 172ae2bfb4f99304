"""A model to be trained, read from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from nightshift.wire.errors import BadInputError
from services.trainer.config import RankConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    kind: Any, config: RankConfig, what: str, *, role: str, setting: str, fix: str, **arguments: Any
) -> tuple[Any, list[str]]:
    """A model in training mode, in the parameters' precision and without dropout.

    DeepSpeed's HfDeepSpeedConfig is not used: it leaves the rotary frequencies in bfloat16, which shifts log-probs.

    Args:
        kind: class of transformers that loads it.
        what: how messages call it.
        setting: the setting that names the folder.
        fix: what to do about a folder that cannot be loaded.
        arguments: further ones of ``from_pretrained``.

    Returns:
        The model, and the names of weights that the folder lacks: they are random.

    Raises:
        BadInputError: the folder holds no model that transformers can load so.
    """
    if not (Path(config.model_path) / "config.json").is_file():
        raise BadInputError(f"no config.json in model folder {config.model_path}", role=role, fix=f"Check {setting}")
    try:
        model, info = kind.from_pretrained(
            config.model_path,
            dtype=DTYPES[config.dtype],
            attn_implementation=config.attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # a .bin file is a pickle
            output_loading_info=True,
            **arguments,
        )
    except Exception as error:  # of many unrelated types, those of safetensors among them
        raise BadInputError(
            f"cannot load the {what} from {config.model_path}: {' '.join(str(error).split())[:500]}", role=role, fix=fix
        ) from error
    # Dropout would make the ratio to the sampler random, and a value another one than is served.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(), sorted(info["missing_keys"])


def refuse_missing(missing: list[str], config: RankConfig, what: str, *, role: str, setting: str) -> None:
    """Refuses a folder without these weights.

    Raises:
        BadInputError: there are any.
    """
    if missing:
        raise BadInputError(
            f"the folder {config.model_path} of the {what} lacks the weights {', '.join(missing[:3])}",
            role=role,
            fix=f"Name a whole model in {setting}",
        )
