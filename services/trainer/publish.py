"""Publication of weights: one safetensors file per version in the weight store, which appears by rename."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nightshift.wire.errors import RoleError
from services.trainer.policy import Policy
from services.trainer.store import KEPT, Publication, published

#: Elements gathered at once from partitioned parameters.
_GATHER_ELEMENTS = 16_000_000
#: Larger tensors are compared with the ones before in this many blocks, evenly spread: the trainer waits meanwhile.
_BLOCKS, _BLOCK_ELEMENTS = 1024, 64


def gather(policy: Policy, dtype: torch.dtype, keep: bool, partitioned: bool) -> dict[str, Tensor]:
    """The model's parameters by their HF names, tied ones once, on the CPU.

    Args:
        policy: the trained module.
        dtype: precision of the result.
        keep: false on ranks that only take part in gathering; they get an empty map.
        partitioned: whether the parameters are spread over the ranks (ZeRO stage 3); then every rank must call this.
    """
    result: dict[str, Tensor] = {}
    for names, parameters in buckets(policy):
        with whole(parameters, partitioned), torch.no_grad():
            if keep:
                for name, parameter in zip(names, parameters, strict=True):
                    value = parameter.detach().to(device="cpu", dtype=dtype)
                    # What shares memory with a partitioned parameter dies with the gathered copy.
                    result[name] = value.clone() if partitioned and value.data_ptr() == parameter.data_ptr() else value
    return result


def publish(tensors: dict[str, Tensor], store: Path) -> Publication:
    """Writes the next file of the store and removes all but the newest two.

    Args:
        tensors: parameters by HF name, in the rollout precision.
        store: the folder of published weights.

    Raises:
        RoleError: the store cannot be written, for example because it is full.
    """
    numbers = published(store)
    number = numbers[-1] + 1 if numbers else 1
    path = store / f"{number}.safetensors"
    partial = store / f".{number}.safetensors.tmp"
    try:
        store.mkdir(parents=True, exist_ok=True)
        # One entry of metadata at most: their order in the file is random, and equal weights have equal digests.
        save_file(tensors, partial, metadata={"format": "pt"})
        digest = blake3(max_threads=1).update_mmap(partial).hexdigest()
        changed = _changed_fraction(tensors, store / f"{numbers[-1]}.safetensors") if numbers else 1.0
        size = partial.stat().st_size
        partial.replace(path)
    except Exception as error:
        partial.unlink(missing_ok=True)
        raise RoleError(
            f"cannot publish weights to {path}: {error}",
            role="trainer",
            fix="Give resources.weight_store room for three copies of the model, or name another folder",
        ) from error
    for old in [*numbers, number][:-KEPT]:
        (store / f"{old}.safetensors").unlink(missing_ok=True)
    return Publication({"path": path.name, "bytes": size, "digest": digest}, digest, size, changed)


def _changed_fraction(tensors: dict[str, Tensor], previous: Path) -> float:
    """Share of elements that differ from a file's; estimated from a part of each large tensor."""
    changed, total = 0.0, 0
    with safe_open(previous, framework="pt") as file:
        known = set(file.keys())
        for name, tensor in tensors.items():
            total += tensor.numel()
            old = file.get_tensor(name) if name in known else None
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                changed += tensor.numel()
            elif tensor.numel():
                differ = _part(tensor) != _part(old)
                changed += tensor.numel() * int(torch.count_nonzero(differ)) / differ.numel()
    return changed / max(1, total)


def _part(tensor: Tensor) -> Tensor:
    """Blocks of a tensor, [blocks, elements]; all of it where it is small."""
    flat = tensor.reshape(-1)
    blocks = flat.numel() // _BLOCK_ELEMENTS
    if blocks <= _BLOCKS:
        return flat[None]
    return flat[: blocks * _BLOCK_ELEMENTS].view(blocks, _BLOCK_ELEMENTS)[:: blocks // _BLOCKS]


def buckets(policy: Policy) -> Iterator[tuple[list[str], list[torch.nn.Parameter]]]:
    """The model's parameters with their HF names, tied ones once, in pieces that are gathered together."""
    names: list[str] = []
    parameters: list[torch.nn.Parameter] = []
    elements = 0
    for name, parameter in policy.model.named_parameters():
        names.append(name)
        parameters.append(parameter)
        elements += getattr(parameter, "ds_numel", parameter.numel())
        if elements >= _GATHER_ELEMENTS:
            yield names, parameters
            names, parameters, elements = [], [], 0
    if names:
        yield names, parameters


@contextmanager
def whole(parameters: list[torch.nn.Parameter], partitioned: bool) -> Iterator[None]:
    """Within, parameters that are spread over the ranks are whole; every rank must enter."""
    if not partitioned:
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(parameters):
        yield
