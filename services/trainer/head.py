"""Log-probs of given tokens from hidden states, without the logits of all of them at once.

A vocabulary of 150 000 makes the logits of one micro-batch larger than everything else in memory. Here they are made
for a chunk of tokens, reduced to a log-prob and an entropy a token, and made again in the backward pass.

With z = W h / temperature and p = softmax(z): log pi(t) = z_t - logsumexp(z), H = logsumexp(z) - sum_j p_j z_j, and
their gradients are d log pi(t) / dz_j = [j = t] - p_j and dH / dz_j = -p_j (log p_j + H).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: Tokens whose logits exist at once.
CHUNK = 4096


def head_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, *, chunk: int = CHUNK, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of N tokens.

    Args:
        hidden: [N, D] states that predict the tokens, in the precision of the matrix product.
        weight: [V, D] of the output layer; its gradient is summed over the chunks in float32.
        targets: [N] int64 token ids.
        temperature: [N] float32 that divides the logits.
        chunk: tokens whose logits exist at once.
        compiled: fuse what is done to the logits into one kernel each way.

    Returns:
        Two [N] float32 tensors: log pi(token), and the entropy at its position in nats.
    """
    logprobs, entropy = _Head.apply(hidden, weight, targets, temperature, chunk, compiled)
    return logprobs, entropy


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int, compiled: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_norm = (
            torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        matrix = weight.to(hidden.dtype)
        reduce = _function(_reduce, compiled)
        for at in range(0, len(targets), chunk):
            part = slice(at, at + chunk)
            values = reduce(hidden[part] @ matrix.t(), targets[part], temperature[part])
            for whole, value in zip((logprobs, entropy, log_norm), values, strict=True):
                whole[part] = value
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy, log_norm)
        ctx.chunk, ctx.compiled = chunk, compiled
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, entropy, log_norm = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        matrix = weight.to(hidden.dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        logits_gradient = _function(_logits_gradient, ctx.compiled)
        for at in range(0, len(targets), ctx.chunk):
            part = slice(at, at + ctx.chunk)
            of_logits = logits_gradient(
                hidden[part] @ matrix.t(),
                targets[part],
                temperature[part],
                log_norm[part],
                entropy[part],
                of_logprobs[part],
                of_entropy[part],
            )
            of_hidden[part] = of_logits @ matrix
            of_weight += of_logits.t() @ hidden[part]
        return of_hidden, of_weight.to(weight.dtype), None, None, None, None


def _reduce(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and log of the normaliser, [C] each, of the logits [C, V]."""
    scaled = logits.float() / temperature[:, None]
    log_norm = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - log_norm
    entropy = log_norm - ((scaled - log_norm[:, None]).exp() * scaled).sum(-1)
    return logprobs, entropy, log_norm


def _logits_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    log_norm: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor,
) -> Tensor:
    """Gradient [C, V] of the logits, in their precision, from those [C] of log-probs and entropies."""
    log_p = logits.float() / temperature[:, None] - log_norm[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    weight = of_logprobs[:, None] + of_entropy[:, None] * (log_p + entropy[:, None])
    gradient = torch.where(is_target, of_logprobs[:, None], 0.0) - log_p.exp() * weight
    return (gradient / temperature[:, None]).to(logits.dtype)


@cache
def _function(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    # One kernel for all numbers of tokens: the last chunk of each micro-batch has another one.
    return torch.compile(function, dynamic=True) if compiled else function
