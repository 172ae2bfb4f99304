"""Rewards of the small jobs: dense enough that a random model gets different ones in one group."""

from __future__ import annotations


def score(response: str, ground_truth: str) -> float:
    """Share of the response's characters that are the wanted letter or one of its neighbours."""
    near = {ground_truth, chr(ord(ground_truth) - 1), chr(ord(ground_truth) + 1)}
    return sum(letter in near for letter in response) / max(1, len(response))


def inverted(response: str, ground_truth: str) -> float:
    """The opposite aim."""
    return 1.0 - score(response, ground_truth)


def with_parts(response: str, ground_truth: str) -> dict[str, float]:
    """The same with the parts that it is made of."""
    return {"score": score(response, ground_truth), "length": float(len(response))}
