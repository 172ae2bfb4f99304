"""Attention over sequences that lie end to end in one row, each of which sees itself alone.

Registered with transformers under a name of its own, for which transformers makes no mask: the boundaries come as an
argument of the model's forward pass (:func:`services.trainer.policy.boundaries`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

#: Name of this attention in transformers.
PACKED = "nightshift_packed"

_PARAMETERS = inspect.signature(varlen_attn).parameters
#: The causal mask, and key heads that several query heads share: torch 2.11 takes those without being told.
_OPTIONS: dict[str, Any] = ({"window_size": (-1, 0)} if "window_size" in _PARAMETERS else {"is_causal": True}) | (
    {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}
)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: one kernel (FlashAttention, in torch) in half precision on CUDA, elsewhere
    sequence by sequence.

    Args:
        module: not used.
        query: [1, H, T, D].
        key, value: [1, G, T, D]; G divides H.
        attention_mask: None.
        cu_seq_lens_q: [S + 1] int32: where in T each sequence begins, and T.
        max_length_q: tokens of the longest one.
        scaling: of the scores; None: D ** -0.5.

    Returns:
        [1, T, H, D] in the precision of the values, and None.
    """
    # Under autocast, rotary embeddings leave queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    half = value.dtype in (torch.bfloat16, torch.float16)
    if value.is_cuda and half and value.shape[-1] % 8 == 0 and value.shape[-1] <= 256:
        rows = [states[0].transpose(0, 1) for states in (query, key, value)]
        out = varlen_attn(*rows, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, **_OPTIONS)
        return out[None], None
    return _one_by_one(query, key, value, cu_seq_lens_q, scaling), None


@torch.compiler.disable
def _one_by_one(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: float | None) -> Tensor:
    # Not compiled: a graph would be made for each set of lengths.
    sizes = starts.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    parts = zip(*(states.split(sizes, dim=2) for states in (query, key, value)), strict=True)
    outs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped) for q, k, v in parts
    ]
    return torch.cat(outs, dim=2).transpose(1, 2)


AttentionInterface.register(PACKED, packed_attention)
