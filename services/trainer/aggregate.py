"""How token losses become one number over a whole batch: partial sums here, one division by the batch's totals.

A micro-batch, a part and a rank each hold a piece of a batch. Means of means would weigh the pieces wrongly, so every
piece contributes a sum, and the sum of the sums is divided by what the whole batch holds. Samples without a trained
token are not counted anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nightshift.wire.errors import BadInputError

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length")


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """The numerator of the batch's loss over the tokens of several samples.

    Args:
        values: [N] per-token values.
        mask: [N] bool, true where the token is trained on.
        weights: [N] of :func:`token_weights`.
    """
    return (values.masked_fill(~mask, 0.0) * weights).sum()


def token_weights(masks: Sequence[NDArray[np.uint8]], aggregation: str) -> NDArray[np.float32]:
    """What each token's loss is multiplied by in :func:`weighted_sum`: 1, or 1/n in a sample of n trained tokens for
    ``seq_mean_token_mean``.

    Args:
        masks: of each sample, [T], 1 where the token is trained on.
        aggregation: a name of AGGREGATIONS.

    Returns:
        [N] for the tokens of all samples in order; 0 where masked.
    """
    weights = [(mask > 0).astype(np.float32) for mask in masks]
    if aggregation == "seq_mean_token_mean":
        weights = [weight / max(1.0, float(weight.sum())) for weight in weights]
    return np.concatenate(weights) if weights else np.zeros(0, np.float32)


def divisor(aggregation: str, total_tokens: int, total_sequences: int, constant_length: int = 0) -> float:
    """What the summed partial sums of a batch are divided by.

    Args:
        aggregation: a name of AGGREGATIONS.
        total_tokens: trained tokens of the whole batch.
        total_sequences: samples of the whole batch with at least one trained token.
        constant_length: divisor per sequence of ``constant_length`` (Dr. GRPO, Liu et al. 2025).

    Raises:
        BadInputError: unknown name, or ``constant_length`` without a positive length.
    """
    if aggregation == "token_mean":
        return float(total_tokens)
    if aggregation in ("seq_mean_token_mean", "seq_mean_token_sum"):
        return float(total_sequences)
    if aggregation == "constant_length":
        if constant_length < 1:
            raise BadInputError(f"aggregation 'constant_length' with constant_length {constant_length}", role="trainer")
        return float(total_sequences * constant_length)
    raise BadInputError(
        f"unknown loss aggregation {aggregation!r}", role="trainer", fix=f"Choose one of {', '.join(AGGREGATIONS)}"
    )
