"""Models from folders that are only asked, never trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nightshift.wire.errors import BadInputError


def device_of(name: str) -> torch.device:
    """The device that "auto" (CUDA where there is one), "cpu" or "cuda" stands for."""
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def load_frozen(
    kind: Any,
    path: str,
    what: str,
    *,
    role: str,
    setting: str,
    fix: str,
    spare: Sequence[str] | None = (),
    **arguments: Any,
) -> Any:
    """A model in evaluation mode, without gradients, on the CPU.

    Args:
        kind: class of transformers that loads it.
        path: folder of a model in safetensors.
        what: how messages call it, for instance "reward model".
        setting: the setting that names the folder.
        fix: what to do about a folder that cannot be loaded.
        spare: parts of the names of weights that the folder may lack; None: it may lack any.
        arguments: further ones of ``from_pretrained``.

    Raises:
        BadInputError: the folder holds no such model.
    """
    if not (Path(path) / "config.json").is_file():
        message = f"there is no {what} in {path}: it has no config.json"
        raise BadInputError(message, role=role, fix=f"Correct {setting}")
    try:
        model, info = kind.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # a .bin file is a pickle
            output_loading_info=True,
            **arguments,
        )
    except Exception as error:  # of many unrelated types, those of safetensors among them
        message = f"the {what} in {path} cannot be loaded: {' '.join(str(error).split())[:500]}"
        raise BadInputError(message, role=role, fix=fix) from error
    lost = sorted(n for n in info["missing_keys"] if spare is not None and not any(part in n for part in spare))
    if lost:  # transformers fills them with random numbers
        message = f"the folder {path} is no {what}: it has no weights for {', '.join(lost[:3])}"
        raise BadInputError(message, role=role, fix="Name a trained model")
    return model.requires_grad_(False).eval()
