"""Resume states and HF exports, written into a temporary folder that is renamed when it is whole.

A resume state holds ``engine/`` (DeepSpeed's files, one set per rank), ``rng_<rank>.safetensors`` and, written last,
``manifest.json``. It is read only by the trainer that wrote it, from the run's own folder: DeepSpeed's files are
pickles, so that a state from elsewhere must not be loaded. An export is safetensors and JSON only.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nightshift.wire.errors import RoleError
from services.trainer.policy import Policy

ENGINE = "engine"
#: What a tokenizer consists of, in the formats that HF folders use.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def save_engine(engine: Any, folder: Path, rank: int, client_state: dict[str, Any]) -> None:
    """Writes one rank's part of a resume state; every rank calls this with the same folder.

    Raises:
        RoleError: the folder cannot be written.
    """
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    try:
        written = engine.save_checkpoint(str(folder), tag=ENGINE, client_state=client_state, save_latest=False)
        save_file(state, folder / f"rng_{rank}.safetensors")
    except Exception as error:  # torch and safetensors raise their own types when a disk is full
        raise _cannot_write(folder, error) from error
    if not written:
        raise RoleError(f"DeepSpeed did not write the resume state to {folder}", role="trainer")


def load_engine(engine: Any, folder: Path, rank: int) -> dict[str, Any]:
    """Loads one rank's part of a resume state; every rank calls this.

    Returns:
        The client state that was saved.

    Raises:
        RoleError: DeepSpeed found no state there.
    """
    path, client_state = engine.load_checkpoint(str(folder), tag=ENGINE, load_lr_scheduler_states=False)
    if path is None:
        raise RoleError(f"no resume state of DeepSpeed in {folder}", role="trainer", fix="Choose another checkpoint")
    state = load_file(folder / f"rng_{rank}.safetensors")
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return dict(client_state)


def export_hf(policy: Policy, tensors: dict[str, Tensor], folder: Path, model_path: Path, tokenizer: Path) -> None:
    """Writes an HF folder: weights, configuration, generation configuration, tokenizer and chat template.

    Args:
        policy: gives the configuration.
        tensors: parameters by HF name in the export's precision, a tied one once.
        folder: where to; made here.
        model_path: folder the model was loaded from.
        tokenizer: folder with the tokenizer's files.

    Raises:
        RoleError: the folder cannot be written.
    """
    model = policy.model
    dtypes = {tensor.dtype for tensor in tensors.values()}
    before = model.config.dtype
    model.config.dtype = dtypes.pop() if len(dtypes) == 1 else before
    try:
        model.save_pretrained(folder, state_dict=tensors, max_shard_size="5GB")
        copies = [(tokenizer, name) for name in TOKENIZER_FILES] + [(model_path, "generation_config.json")]
        for source, name in copies:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        templates = tokenizer / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, folder / templates.name, dirs_exist_ok=True)
    except Exception as error:
        raise _cannot_write(folder, error) from error
    finally:
        model.config.dtype = before


def _cannot_write(folder: Path, error: Exception) -> RoleError:
    return RoleError(
        f"cannot write {folder}: {error}", role="trainer", fix="Free space there, or lower checkpoint.keep"
    )
