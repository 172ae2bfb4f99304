"""Client of scorers: calls batched by size and time, retried while the scorer is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from nightshift.wire import codec, listen
from nightshift.wire.errors import RoleError, RoleTimeoutError, WireError
from nightshift.wire.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc
from orchestrator.runner.answers import ROUNDING

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_SHORT_S = 30.0
#: Roles whose values are log-probs of tokens.
LOG_PROB_ROLES = frozenset({"reference", "teacher"})
#: A call may wait for further groups for this share of what the last one took, at most so many seconds: a call costs
#: much the same for one group as for eight, and a scorer that is slow does not become slower by it.
_WAIT_SHARE, _LONGEST_WAIT_S = 0.05, 0.25
#: Codes after which the call may be made again: the scorer restarts (and cancels what it is at), or its queue is
#: full.
_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
    }
)


@dataclass(slots=True)
class Scored:
    """Results of one caller's samples, in their order, with the seconds that the scorer took."""

    results: list[dict[str, Any]]
    seconds: float
    peak_memory_bytes: int


@dataclass(slots=True)
class _Call:
    samples: Sequence[Any]
    traceparent: str
    answer: asyncio.Future[Scored]


class ScorerClient:
    """One scorer. Calls of several prompt groups that fall within a short time travel together.

    Args:
        role: name for errors, for instance "reward" or "reference".
        url: ``grpc://host:port``.
        application: the deployment behind the ingress.
        timeout_s: deadline of one attempt.
        sample_s: added to the deadline for each sample of a call: a reward function may take its limit for each.
        away_s: how long the scorer may be away, or let attempts run out of time, before the call fails.
        batch_samples: most samples in one call; a single group may exceed it.
        batch_wait_s: how long a call waits for further groups, at least: a slow scorer's wait longer; 0: none does.
        token: that its calls must carry; "": none.
    """

    def __init__(
        self,
        role: str,
        url: str,
        application: str,
        *,
        run_id: str,
        job_trace_id: str,
        timeout_s: float,
        away_s: float,
        sample_s: float = 0.0,
        batch_samples: int = 32,
        batch_wait_s: float = 0.02,
        token: str = "",
    ) -> None:
        self.role = role
        self.weights = b""  # msgpack of the update_info that a model whose weights change answers with
        self._url = url
        self._run_id = run_id
        self._job_trace_id = job_trace_id
        self._timeout_s = timeout_s
        self._sample_s = sample_s
        self._away_s = away_s
        self._batch_samples = batch_samples
        self._batch_wait_s = batch_wait_s
        self._last_call_s = 0.0  # what the last answer took
        self._metadata = (("application", application), *listen.metadata(token))
        self._channel = grpc.aio.insecure_channel(url.removeprefix("grpc://"), options=_OPTIONS)
        self._stub = scorer_pb2_grpc.ScorerServiceStub(self._channel)
        self._waiting: list[_Call] = []
        self._flush: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, samples: Sequence[Any], traceparent: str = "") -> Scored:
        """Scores the samples of one group.

        Raises:
            RoleTimeoutError: no answer for as long as the scorer may be away.
            RoleError: the scorer refused the samples, or answered for other ones.
        """
        call = _Call(samples, traceparent, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if sum(len(waiting.samples) for waiting in self._waiting) >= self._batch_samples:
            self._send_waiting()
        elif self._flush is None:
            self._flush = asyncio.create_task(self._send_later())
        return await call.answer

    async def describe(self) -> scorer_pb2.DescribeResponse:
        """What answers at the URL.

        Raises:
            RoleTimeoutError: nothing answers.
        """
        request = scorer_pb2.DescribeRequest(context=self._context(""))
        answer: scorer_pb2.DescribeResponse = await self._retry(
            lambda: self._stub.Describe(request, timeout=_SHORT_S, metadata=self._metadata), _SHORT_S
        )
        return answer

    async def close(self) -> None:
        """Cancels what is waiting and closes the connection."""
        tasks = [*self._sending, *([self._flush] if self._flush else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    async def _send_later(self) -> None:
        share = min(_LONGEST_WAIT_S, _WAIT_SHARE * self._last_call_s)
        await asyncio.sleep(max(self._batch_wait_s, share) if self._batch_wait_s else 0)
        self._flush = None
        self._send_waiting()

    def _send_waiting(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        calls, self._waiting = self._waiting, []
        if calls:
            task = asyncio.create_task(self._send(calls))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, calls: list[_Call]) -> None:
        try:
            samples = [sample for call in calls for sample in call.samples]
            request = scorer_pb2.ScoreRequest(
                context=self._context(calls[0].traceparent),
                samples=codec.pack(samples),
                linked=[call.traceparent for call in calls[1:] if call.traceparent],
                weights=self.weights,
            )
            metadata: tuple[tuple[str, str], ...] = self._metadata
            if calls[0].traceparent:
                metadata = (*metadata, ("traceparent", calls[0].traceparent))
            timeout_s = self._timeout_s + self._sample_s * len(samples)
            loop = asyncio.get_running_loop()
            began = loop.time()
            response = await self._retry(
                lambda: self._stub.Score(request, timeout=timeout_s, metadata=metadata), timeout_s
            )
            self._last_call_s = loop.time() - began
            try:
                results = self._check(codec.unpack(response.results), samples)
            except WireError as error:
                raise RoleError(f"{self._url} answered with no results: {error.message}", role=self.role) from error
            at = 0
            for call in calls:
                part = results[at : at + len(call.samples)]
                at += len(call.samples)
                if not call.answer.done():
                    call.answer.set_result(Scored(part, response.seconds, response.peak_memory_bytes))
        except BaseException as error:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error) if isinstance(error, Exception) else call.answer.cancel()
            if not isinstance(error, Exception):
                raise

    def _check(self, results: Any, samples: Sequence[Any]) -> list[dict[str, Any]]:
        wanted = [sample["id"] for sample in samples]
        maps = isinstance(results, list) and all(isinstance(result, dict) for result in results)
        got = [result.get("id") for result in results] if maps else None
        if got != wanted:
            count = len(got) if got is not None else 0
            raise RoleError(
                f"{self._url} answered {count} results for {len(wanted)} samples, or for other samples",
                role=self.role,
                fix="A scorer answers one result per sample, in the order of the request",
            )
        return list(results)

    async def _retry(self, call: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + self._away_s
        pause, asked = 0.2, 0
        while True:
            asked += 1
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                code, detail = error.code(), (error.details() or "").strip().splitlines()
                cause = detail[0] if detail else code.name
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    # A replica that is being replaced answers nothing either, and may take longer than one call has.
                    if time.monotonic() + pause > deadline:
                        raise RoleTimeoutError(
                            f"{self._url} did not answer within {timeout_s:g} s, asked {asked} times", role=self.role
                        ) from error
                elif code not in _AGAIN:
                    raise RoleError(f"{self._url} refused the call ({code.name}): {cause}", role=self.role) from error
                elif time.monotonic() + pause > deadline:
                    raise RoleTimeoutError(
                        f"{self._url} was away for {self._away_s:g} s ({code.name}): {cause}", role=self.role
                    ) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    def _context(self, traceparent: str) -> common_pb2.Context:
        return common_pb2.Context(run_id=self._run_id, traceparent=traceparent, job_trace_id=self._job_trace_id)


def require_ids(result: dict[str, Any], sample: dict[str, Any], role: str) -> None:
    """Checks that a sequence result belongs to the sampled tokens and can be used.

    Raises:
        WireError: the number of values, or the echoed ids, differ from the response's, a value is no finite number, or
            a log-prob is positive.
    """
    tokens = len(sample["response_ids"])
    values = _array(result.get("logprobs", ()))
    if values.shape != (tokens,):
        raise WireError(f"{values.size} log-probs for {tokens} tokens of {sample['id']}", role=role)
    if values.dtype.kind not in "fiu" or not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise WireError(f"a log-prob of {sample['id']} is no finite number", role=role)
    if role in LOG_PROB_ROLES and (values > ROUNDING).any():  # a critic's values may be anything
        raise WireError(f"a log-prob of {sample['id']} is positive: {values.max():.3g}", role=role)
    echoed = result.get("token_ids")
    if echoed is not None and not np.array_equal(_array(echoed), np.asarray(sample["response_ids"])):
        raise WireError(f"log-probs of other tokens than those of {sample['id']}", role=role)


def _array(value: Any) -> NDArray[Any]:
    """Whatever a scorer answered as an array; what is none is one without a shape."""
    try:
        return np.asarray(value)
    except (OverflowError, TypeError, ValueError):
        return np.asarray(None)
