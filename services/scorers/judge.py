"""A language model as a judge, behind any OpenAI-compatible URL."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from nightshift.wire.errors import BadInputError
from nightshift.wire.scoring import RewardResult
from services.scorers.results import prompt_text, result

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NAMED = re.compile(r"(?:grade|score|rating)\W{0,4}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIELDS = ("prompt", "response", "ground_truth")


class JudgeScorer:
    """Asks for a grade of each sample.

    Args:
        settings: fields of :class:`nightshift.config.rewards.JudgeReward`.
        transport: for tests: answers in place of the network.

    Raises:
        BadInputError: the grades' range is empty, the instruction leaves the response out, or the variable of the key
            is not set.
    """

    def __init__(self, settings: Mapping[str, Any], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._settings = settings
        if settings["highest"] <= settings["lowest"]:
            raise _bad(f"highest {settings['highest']} is not above lowest {settings['lowest']}", "Give a range")
        if "{response}" not in settings["instruction"]:
            raise _bad("its instruction has no {response}", "Say where the answer stands")
        headers = {}
        if variable := settings["api_key_variable"]:
            if not os.environ.get(variable):
                raise _bad(f"the environment variable {variable} is not set", "Set it to the key")
            headers["Authorization"] = f"Bearer {os.environ[variable]}"
        self._client = httpx.AsyncClient(
            base_url=settings["url"].rstrip("/") + "/",
            headers=headers,
            timeout=settings["timeout_s"],
            transport=transport,
            trust_env=False,
        )
        self._places = asyncio.Semaphore(settings["concurrency"])

    async def score(self, samples: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """Grades in the order of the samples, brought to 0 (lowest) to 1 (highest)."""
        return await asyncio.gather(*(self._one(sample) for sample in samples))

    async def _one(self, sample: Mapping[str, Any]) -> RewardResult:
        began = time.perf_counter()
        try:
            async with self._places, asyncio.timeout(self._settings["timeout_s"]):
                reply = await self._ask(fill(self._settings["instruction"], sample))
        except TimeoutError:
            limit = self._settings["timeout_s"]
            return result(sample, None, began, "timeout", f"the judge did not answer within {limit:g} s")
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            return result(sample, None, began, "raised", f"the judge failed: {type(error).__name__}: {error}")
        grade = read_grade(reply, self._settings["lowest"], self._settings["highest"])
        if grade is None:
            return result(sample, None, began, "type", f"the judge gave no grade in its range: {reply[:200]!r}")
        low, high = self._settings["lowest"], self._settings["highest"]
        return result(sample, (grade - low) / (high - low), began)

    async def _ask(self, text: str) -> str:
        body = {
            "model": self._settings["model"],
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self._settings["max_tokens"],
        }
        pause = 0.5
        for attempt in range(self._settings["retries"] + 1):
            last = attempt == self._settings["retries"]
            try:
                response = await self._client.post("chat/completions", json=body)
            except httpx.TransportError:
                if last:
                    raise
            else:
                if response.status_code not in _AGAIN or last:
                    response.raise_for_status()
                    return str(response.json()["choices"][0]["message"]["content"] or "")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 8.0)
        raise ValueError("no attempt was made")


def fill(instruction: str, sample: Mapping[str, Any]) -> str:
    """The instruction with the sample's texts; other braces stay as they are."""
    values = {name: prompt_text(sample.get(name)) if name == "prompt" else str(sample.get(name)) for name in _FIELDS}
    # One pass, so that braces in a response are not filled in turn.
    return re.sub(r"\{(prompt|response|ground_truth)\}", lambda match: values[match.group(1)], instruction)


def read_grade(reply: str, lowest: float, highest: float) -> float | None:
    """The grade in a reply: the last number after "grade", "score" or "rating", else the only number; None otherwise.

    A number outside the range is no grade.
    """
    named = _NAMED.findall(reply)
    found = named[-1:] if named else _NUMBER.findall(reply)
    if len(found) != 1:
        return None
    grade = float(found[0])
    return grade if lowest <= grade <= highest else None


def _bad(message: str, fix: str) -> BadInputError:
    return BadInputError(f"the judge: {message}", role="reward", fix=fix)
