"""Checks of a published weight file, made before a model is touched. No torch and no vLLM here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

Shape = tuple[int, ...]

_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_MAX_HEADER = 100 << 20
_TIED_HEAD = "lm_head.weight"
_LISTED = 3


class WeightFileError(ValueError):
    """A weight file that must not be loaded; the message says why. The model is as it was."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file."""

    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: Shape


def confine(root: Path, name: str) -> Path:
    """The file ``name`` below ``root``; ``name`` is relative to it or absolute.

    Raises:
        WeightFileError: the file lies elsewhere, also by a link, or does not exist.
    """
    base = Path(os.path.realpath(root))
    path = Path(os.path.realpath(base / name))
    if base not in path.parents:
        raise WeightFileError(f"weight file {name!r} lies outside the weight store {str(root)!r}")
    if not path.is_file():
        raise WeightFileError(f"weight file {name!r} does not exist in the weight store {str(root)!r}")
    return path


def narrow(root: Path, requested: str | None) -> Path:
    """The folder that a client asked for, which must be ``root`` itself or lie below it.

    Raises:
        WeightFileError: it lies elsewhere.
    """
    if requested is None:
        return root
    base, wanted = Path(os.path.realpath(root)), Path(os.path.realpath(requested))
    if wanted != base and base not in wanted.parents:
        raise WeightFileError(
            f"weight store {requested!r} lies outside {str(root)!r}, which the server was started with"
        )
    return wanted


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes in a safetensors file, which must be complete.

    Raises:
        WeightFileError: not a safetensors file, cut short, or with tensors that overlap, leave gaps or are no floats.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise WeightFileError(f"weight file {path.name} is no complete safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
            spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightFileError(f"weight file {path.name} has an unreadable header: {error}") from error
    end = 0
    for start, stop, name in spans:
        info = tensors[name]
        if info.dtype not in _DTYPE_BYTES:
            raise WeightFileError(
                f"weight file {path.name}: {name} is {info.dtype}, expected one of {list(_DTYPE_BYTES)}"
            )
        if start != end or stop - start != math.prod(info.shape) * _DTYPE_BYTES[info.dtype]:
            raise WeightFileError(
                f"weight file {path.name}: bytes {start} to {stop} do not fit {name} {list(info.shape)}"
            )
        end = stop
    if 8 + length + end != size:
        raise WeightFileError(f"weight file {path.name} has {size} bytes, its header describes {8 + length + end}")
    return tensors


def check_content(path: Path, size: int | None, digest: str | None) -> None:
    """Checks the bytes of a file against what its writer said; None: not said.

    Args:
        size: bytes.
        digest: BLAKE3, hex.

    Raises:
        WeightFileError: they differ.
    """
    actual = path.stat().st_size
    if size is not None and size != actual:
        raise WeightFileError(f"weight file {path.name} has {actual} bytes, expected {size}")
    if digest is not None:
        # One thread: the server's other threads may not take a second core.
        found = blake3(max_threads=1).update_mmap(path).hexdigest()
        if found != digest.lower():
            raise WeightFileError(f"weight file {path.name} is corrupt: BLAKE3 {found}, expected {digest}")


def model_shapes(folder: Path) -> dict[str, Shape] | None:
    """Tensor shapes of the model in an HF folder, by HF name; None where it holds no safetensors.

    Raises:
        WeightFileError: one of its files is damaged.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    return {name: info.shape for file in files for name, info in read_header(file).items()}


def check_tensors(found: Mapping[str, TensorInfo], expected: Mapping[str, Shape], *, tied: bool) -> None:
    """Checks that a file holds the whole model and nothing else: what is missing would silently stay old.

    Args:
        tied: the head shares the embedding's weights, so that it may be in either of the two or not.

    Raises:
        WeightFileError: names are missing or unknown, or a shape differs.
    """
    optional = {_TIED_HEAD} if tied else set()
    problems = [
        ("lacks", sorted(expected.keys() - found.keys() - optional)),
        ("has the unknown", sorted(found.keys() - expected.keys() - optional)),
        ("has another shape for", sorted(n for n in expected.keys() & found.keys() if expected[n] != found[n].shape)),
    ]
    texts = [f"{what} {_listed(names)}" for what, names in problems if names]
    if texts:
        raise WeightFileError("weight file does not fit the model: it " + "; it ".join(texts))


def _listed(names: list[Any]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
