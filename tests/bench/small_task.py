"""A small task for learning curves: the three largest digits, in order. A transformer of a million parameters.

The warmed-up model knows the form alone: it answers with three digits of the prompt, whichever. What to choose it
learns from rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

#: Ids: 0 to 9 are the digits.
EQUALS, END, VOCABULARY = 10, 11, 12
LONGEST = 7  # digits of a prompt
WANTED = 3  # digits of an answer
MAX_RESPONSE = WANTED + 3  # an answer with END has WANTED + 1 tokens
POSITIONS = LONGEST + 1 + MAX_RESPONSE

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """Digits to choose from, and the right answer with its END."""

    prompt: Ints
    answer: Ints


def problems(count: int, rng: np.random.Generator) -> list[Problem]:
    """Random problems of 5 to 7 digits."""
    found = []
    for _ in range(count):
        digits = rng.integers(0, 10, int(rng.integers(5, LONGEST + 1)))
        largest = np.sort(digits)[::-1][:WANTED]
        found.append(Problem(np.append(digits, EQUALS), np.append(largest, END)))
    return found


def reward(problem: Problem, response: Ints) -> float:
    """Share of the digits that are right, in their places; 0 for an answer of another length."""
    if len(response) != len(problem.answer) or response[-1] != END:
        return 0.0
    return float((response[:-1] == problem.answer[:-1]).mean())


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: list[Tensor] | None, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Small(nn.Module):
    """A decoder with ``outputs`` numbers per position: logits, or one value.

    Prompts are padded on the left, so that all responses of a batch begin in one column; padded places are not seen.
    """

    def __init__(self, outputs: int = VOCABULARY, width: int = 136, layers: int = 5, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(POSITIONS, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids: Tensor, padding: Tensor, cache: list[list[Tensor]] | None = None) -> Tensor:
        """Outputs [B, L, outputs] of ids [B, L].

        Args:
            padding: [B] padded places at the left of each row.
            cache: keys and values of what came before, one list per block; None: nothing is kept.
        """
        start = cache[0][0].shape[2] if cache and cache[0] else 0
        columns = torch.arange(start, start + ids.shape[1])
        seen = torch.arange(start + ids.shape[1])
        mask = (seen[None, :] <= columns[:, None])[None] & (seen[None, None, :] >= padding[:, None, None])
        mask = (mask | (seen[None, None, :] == columns[None, :, None]))[:, None]  # no row of the softmax is empty
        x = self.embed(ids) + self.place((columns[None, :] - padding[:, None]).clamp(min=0))
        for index, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[index], mask)
        out: Tensor = self.head(self.norm(x))
        return out


def left_padded(prompts: list[Ints]) -> tuple[Tensor, Tensor]:
    """Ids [B, P] and the padded places [B]."""
    width = max(map(len, prompts))
    ids = np.full((len(prompts), width), EQUALS, np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
    return torch.from_numpy(ids), torch.tensor([width - len(prompt) for prompt in prompts])


@torch.no_grad()
def sample(
    model: Small, prompts: list[Ints], temperature: float, generator: torch.Generator
) -> tuple[list[Ints], list[NDArray[np.float32]]]:
    """Draws one response to each prompt, greedily with temperature 0; returns ids and their log-probs.

    A response ends with END, or after MAX_RESPONSE tokens without it.
    """
    ids, padding = left_padded(prompts)
    cache: list[list[Tensor]] = [[] for _ in model.blocks]
    logits = model(ids, padding, cache)[:, -1]
    drawn, values = [], []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    lengths = torch.full((len(prompts),), MAX_RESPONSE)
    for step in range(MAX_RESPONSE):
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
        if temperature:
            token = torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(1)
        else:
            token = logits.argmax(-1)
        drawn.append(token)
        values.append(logprobs.gather(1, token[:, None]).squeeze(1))
        ended = ~done & (token == END)
        lengths[ended] = step + 1
        done |= ended
        if bool(done.all()):
            break
        logits = model(token[:, None], padding, cache)[:, -1]
    tokens, logs = torch.stack(drawn, 1).numpy(), torch.stack(values, 1).numpy()
    return (
        [row[: int(n)] for row, n in zip(tokens, lengths, strict=True)],
        [row[: int(n)] for row, n in zip(logs, lengths, strict=True)],
    )


def response_outputs(model: Small, prompts: list[Ints], responses: list[Ints]) -> Tensor:
    """Outputs [N, outputs] at the positions that predict the tokens of all responses, one after the other."""
    ids, padding = left_padded(prompts)
    width = ids.shape[1]
    longest = max(map(len, responses))
    tail = np.full((len(responses), longest), END, np.int64)
    for row, response in enumerate(responses):
        tail[row, : len(response)] = response
    outputs = model(torch.cat([ids, torch.from_numpy(tail)], 1)[:, :-1], padding)[:, width - 1 :]
    kept = torch.arange(longest)[None, :] < torch.tensor([len(response) for response in responses])[:, None]
    return outputs[kept]


def token_logprobs(model: Small, prompts: list[Ints], responses: list[Ints], temperature: float) -> Tensor:
    """Log-probs [N] of the tokens of all responses, one after the other."""
    logits = response_outputs(model, prompts, responses) / temperature
    targets = torch.from_numpy(np.concatenate(responses))
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)


def warm_up(seed: int, steps: int, batch: int = 32) -> Small:
    """A model from scratch after a few steps on answers of the right form: digits of the prompt, in any order."""
    torch.manual_seed(seed)
    rng = np.random.default_rng((seed, 1))
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        picked = problems(batch, rng)
        shown = [np.append(rng.choice(p.prompt[:-1], WANTED, replace=False), END) for p in picked]
        loss = -token_logprobs(model, [p.prompt for p in picked], shown, 1.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: Small, held_out: list[Problem]) -> float:
    """Mean reward of greedy decoding: the share of digits that it gets right."""
    responses, _ = sample(model, [problem.prompt for problem in held_out], 0.0, torch.Generator())
    return float(np.mean([reward(p, r) for p, r in zip(held_out, responses, strict=True)]))
