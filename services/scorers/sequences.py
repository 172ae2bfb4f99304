"""Prompts with their responses as token ids: checked, and batched for a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nightshift.wire.errors import WireError


class TokenSequence(NamedTuple):
    """A prompt of P > 0 tokens and a response of T tokens, all of them in the model's vocabulary."""

    id: str
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [T] int32
    temperature: float  # divisor of the logits, above 0

    @property
    def tokens(self) -> int:
        """P + T."""
        return len(self.prompt_ids) + len(self.response_ids)


def check_sequence(sample: Any, index: int, vocabulary: int, positions: int) -> TokenSequence:
    """Reads a sample of a request.

    Args:
        index: its place in the request, for messages about one without a name.
        vocabulary: ids of the model.
        positions: of the model.

    Raises:
        WireError: it is malformed, too long, or holds an id outside the vocabulary.
    """
    if not isinstance(sample, dict) or not isinstance(sample.get("id"), str):
        raise WireError(f"sample {index} is no map with a text 'id'")
    name = sample["id"]
    prompt, response = (_ids(sample.get(key), key, name, vocabulary) for key in ("prompt_ids", "response_ids"))
    if not len(prompt):
        raise WireError(f"sample {name}: prompt_ids is empty, so that nothing predicts the first response token")
    if len(prompt) + len(response) > positions:
        length = f"{len(prompt)} + {len(response)} tokens"
        raise WireError(f"sample {name}: {length} are more than the model's {positions} positions")
    temperature = sample.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < np.inf:
        raise WireError(f"sample {name}: temperature is {temperature!r}, expected a number above 0")
    return TokenSequence(name, prompt, response, float(temperature))


def passes(sequences: Sequence[TokenSequence], size: int) -> Iterator[list[int]]:
    """Places of the sequences that share a forward pass: ``size`` of like length, those without a response left out.

    Which ones share one depends on the request alone.
    """
    some = (at for at, sequence in enumerate(sequences) if len(sequence.response_ids))
    order = sorted(some, key=lambda at: (sequences[at].tokens, at))
    for first in range(0, len(order), size):
        yield order[first : first + size]


def padded(rows: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, L] int64 and mask [B, L] int64 of rows of token ids.

    They are padded on the right: no token before it attends to the padding, and its own outputs are not looked at.
    """
    ids_BL = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for b, row in enumerate(rows):
        ids_BL[b, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask_BL[b, : len(row)] = 1
    return ids_BL.to(device), mask_BL.to(device)


def described(**tensors: Tensor) -> list[dict[str, Any]]:
    """Name, shape, dtype and device of tensors, for the job's debug mode."""
    return [
        {"name": name, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "device": str(t.device)}
        for name, t in tensors.items()
    ]


def _ids(value: Any, key: str, name: str, vocabulary: int) -> np.ndarray:
    """Token ids as int32; a plain list of ints is taken too, since other languages may send one."""
    array = np.asarray(value)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise WireError(f"sample {name}: {key} is not a list of token ids")
    if array.min() < 0 or array.max() >= vocabulary:
        bad = array[(array < 0) | (array >= vocabulary)][0]
        raise WireError(f"sample {name}: {key} holds {bad}, the vocabulary has {vocabulary} ids")
    return array.astype(np.int32)
