"""A frozen model behind a vLLM server that somebody else runs: reference or teacher of a run, by its URL.

It gives the log-probs of tokens that others sampled, at temperature 1, as a prompt's log-probs. Any tier will do: no
weights are sent to it, and nothing that it samples is trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import numpy as np

from nightshift.wire.errors import RoleError, RoleTimeoutError
from nightshift.wire.experience import Floats
from nightshift.wire.listen import LOOPBACK
from nightshift.wire.rollout import INFO
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.answers import ROUNDING, InvalidAnswerError, parse_prompt_logprobs
from orchestrator.runner.capabilities import GENERATE
from orchestrator.runner.scorer import Scored
from orchestrator.runner.tiers import ASKED_BY_GET, ASKED_BY_POST, COMPLETIONS, Standing, standing

_SHORT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
#: Sequences that are sent at once; more wait here and not in the server's queue.
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of the model; 0: the server does not say how many tokens it has."""

    vocab_size: int = 0


class FrozenModel:
    """One server.

    Args:
        role: "reference" or "teacher".
        url: ``http://host:port``.
        token: bearer token; "" for none.
        timeout_s: deadline of one sequence.
        away_s: how long the server may be away before a call fails.
    """

    def __init__(self, role: str, url: str, token: str, *, timeout_s: float, away_s: float) -> None:
        self.role = role
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._away_s = away_s
        self._standing: Standing | None = None
        self._model = ""
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            trust_env=httpx.URL(url).host not in LOOPBACK,
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def describe(self) -> Described:
        """Finds out what answers at the URL.

        Raises:
            RoleTimeoutError: nothing answers.
            RoleError: what answers can be used for nothing.
        """
        await self.standing()
        return Described()

    async def standing(self) -> Standing:
        """The tier of the server."""
        if self._standing is None:
            statuses = {path: (await self._ask("GET", path)).status_code for path in ASKED_BY_GET}
            statuses |= {path: (await self._ask("POST", path, {})).status_code for path in ASKED_BY_POST}
            if 401 in statuses.values():
                raise self._error("refuses the token", f"Set NIGHTSHIFT_{self.role.upper()}_TOKEN")
            info = await self._ask("GET", INFO)
            version = await self._ask("GET", "/version")
            models = await self._ask("GET", "/v1/models")
            if models.status_code == 200:
                self._model = str((_list(models, "data") or [{}])[0].get("id", ""))
            self._standing = standing(
                f"the {self.role} at {self._url}",
                _object(info) if info.status_code == 200 else None,
                str(_object(version).get("version", "")) if version.status_code == 200 else "",
                statuses,
            )
        return self._standing

    async def score(self, samples: Sequence[SequenceInput], traceparent: str = "") -> Scored:
        """Log-probs of the response tokens of each sequence, in their order, as a deployed reference answers.

        Raises:
            RoleTimeoutError: no answer for as long as the server may be away.
            RoleError: it refused a sequence, or answered with something else than its log-probs.
        """
        began = time.monotonic()
        found = await self.standing()
        values = await asyncio.gather(*(self._one(found, sample, traceparent) for sample in samples))
        results = [
            {"id": sample["id"], "response_ids": sample["response_ids"], "logprobs": logprobs}
            for sample, logprobs in zip(samples, values, strict=True)
        ]
        return Scored(results, time.monotonic() - began, 0)

    async def _one(self, found: Standing, sample: SequenceInput, traceparent: str) -> Floats:
        prompt, response = [int(t) for t in sample["prompt_ids"]], [int(t) for t in sample["response_ids"]]
        ids = [*prompt, *response]
        sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        if found.generate:
            path, body = GENERATE, {"token_ids": ids, "sampling_params": sampling}
        else:
            path, body = COMPLETIONS, {"model": self._model, "prompt": ids, **sampling}
        async with self._slots:
            answer = await self._ask("POST", path, body, {"traceparent": traceparent} if traceparent else {})
        if answer.status_code != 200:
            raise self._error(f"refused {sample['id']} with {answer.status_code}: {answer.text[:300]}")
        whole = _object(answer)
        rows = whole.get("prompt_logprobs") or (_list(answer, "choices") or [{}])[0].get("prompt_logprobs") or []
        try:
            values = parse_prompt_logprobs(rows, ids, len(prompt))
        except InvalidAnswerError as error:
            raise self._error(f"{error.message}, of {sample['id']}") from error
        if not (np.isfinite(values) & (values <= ROUNDING)).all():
            raise self._error(f"answered with log-probs that cannot be for {sample['id']}")
        return np.minimum(values, np.float32(0))

    async def _ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """An answer of any status below 500, asked for again while the server is away."""
        deadline, pause = time.monotonic() + self._away_s, _FIRST_PAUSE_S
        timeout_s = self._timeout_s if body else min(_SHORT_S, self._timeout_s)
        while True:
            try:
                answer = await self._http.request(method, path, json=body, headers=headers, timeout=timeout_s)
                if answer.status_code < 500:
                    return answer
                cause = f"{path} was answered with {answer.status_code}"
            except httpx.HTTPError as error:
                cause = str(error) or type(error).__name__
            if time.monotonic() + pause > deadline:
                raise RoleTimeoutError(f"{self._url} was away for {self._away_s:g} s: {cause}", role=self.role)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _error(self, text: str, fix: str = "") -> RoleError:
        return RoleError(f"{self._url} {text}", role=self.role, fix=fix)


#: What scores tokens: a deployment behind our own protocol, or a vLLM server.
class TokenScorer(Protocol):
    """What gives a number for each response token."""

    role: str

    async def score(self, samples: Sequence[Any], traceparent: str = "") -> Scored: ...

    async def describe(self) -> Any: ...

    async def close(self) -> None: ...


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = answer.json()
    except (ValueError, RecursionError):  # no JSON, or one that is thousands of levels deep
        return {}
    return value if isinstance(value, dict) else {}


def _list(answer: httpx.Response, key: str) -> list[dict[str, Any]]:
    value = _object(answer).get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
