"""Several references as one: the log-probs of their mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nightshift.wire.errors import RoleError
from nightshift.wire.experience import Floats
from orchestrator.runner.frozen import TokenScorer
from orchestrator.runner.scorer import Scored, require_ids
from orchestrator.runner.together import together


def mixture(logprobs: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """Log-probs of tokens under a mixture of models: log sum w p, token by token.

    Args:
        logprobs: of each model, [T].
        weights: of each model, adding up to 1.
    """
    parts = [np.log(weight) + values.astype(np.float64) for values, weight in zip(logprobs, weights, strict=True)]
    mixed: Floats = np.logaddexp.reduce(np.stack(parts), axis=0).astype(np.float32)
    return mixed


class MixedScorer:
    """Asks all its models at once.

    Args:
        scorers: of one role.
        weights: shares of the mixture, adding up to 1.
    """

    def __init__(self, scorers: Sequence[TokenScorer], weights: Sequence[float]) -> None:
        self.role = scorers[0].role
        self._scorers = scorers
        self._weights = weights

    async def score(self, samples: Sequence[Any], traceparent: str = "") -> Scored:
        """Log-probs of the mixture for each sample, in their order.

        Raises:
            RoleError: a model was away, or answered for other tokens.
        """
        parts = await together(scorer.score(samples, traceparent) for scorer in self._scorers)
        results = []
        for at, sample in enumerate(samples):
            answers = [part.results[at] for part in parts]
            for answer in answers:
                require_ids(answer, sample, self.role)
            values = mixture([np.asarray(answer["logprobs"], np.float32) for answer in answers], self._weights)
            results.append({"id": sample["id"], "logprobs": values, "token_ids": sample["response_ids"]})
        return Scored(results, max(part.seconds for part in parts), sum(part.peak_memory_bytes for part in parts))

    async def describe(self) -> Any:
        """What the first model says of itself.

        Raises:
            RoleError: the models have different vocabularies.
        """
        answers = [await scorer.describe() for scorer in self._scorers]
        sizes = {answer.vocab_size for answer in answers if answer.vocab_size}
        if len(sizes) > 1:
            raise RoleError(
                f"its models have {' and '.join(map(str, sorted(sizes)))} tokens, which cannot be mixed",
                role=self.role,
                fix="Mix models of one vocabulary",
            )
        return answers[0]

    async def close(self) -> None:
        """Closes the connections."""
        for scorer in self._scorers:
            await scorer.close()
