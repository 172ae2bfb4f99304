"""One prompt group on its way: n samples drawn, then rewarded and scored by the reference at the same time."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from opentelemetry.trace import Span

from nightshift.analysis.spans import Interval
from nightshift.config import JobSpec
from nightshift.data import Prompt, Tokenizer
from nightshift.wire.errors import NightshiftError, RoleError
from nightshift.wire.experience import Floats, Sample
from nightshift.wire.scoring import RewardInput, SequenceInput
from nightshift.wire.version import PolicyVersion
from orchestrator.runner.answers import EngineRefusedError, Generated, GenerateRequest, InvalidAnswerError
from orchestrator.runner.busy import BusyClock
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.frozen import TokenScorer
from orchestrator.runner.scorer import Scored, ScorerClient, require_ids
from orchestrator.runner.shaping import rewards_for, shape
from orchestrator.runner.tensors import tensors_told
from orchestrator.runner.together import together
from orchestrator.runner.tracing import Tracing

#: Largest size of a reward and its parts.
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class Group:
    """A prompt group in flight."""

    index: int
    prompt: Prompt
    epoch: int
    trace_id: str
    started_version: int  # step of the weights that the servers held when it started
    span: Span
    waiting: Span | None = None  # open while the group waits: for the ledger and its start, then for its step
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # causes of samples that could not be had
    tensors: list[dict[str, Any]] = field(default_factory=list)  # in debug mode: what the scorers say of their own
    intervals: dict[str, Interval] = field(default_factory=dict)  # role -> (start, end), unix seconds

    @property
    def group_id(self) -> str:
        """Name of the group in ids and files."""
        return group_id(self.index)

    @property
    def versions(self) -> set[str]:
        """Versions of the weights that its tokens were sampled with."""
        return {span.version for sample in self.samples for span in sample.versions}

    @property
    def oldest_version(self) -> int:
        """Step of the oldest weights that any of its tokens was sampled with."""
        return min((PolicyVersion.parse(version).step for version in self.versions), default=self.started_version)

    @property
    def bytes(self) -> int:
        """Bytes of the experience that it holds."""
        arrays = [
            array
            for sample in self.samples
            for array in (
                sample.prompt_ids,
                sample.response_ids,
                sample.logprobs,
                sample.loss_mask,
                sample.ref_logprobs,
                sample.teacher_logprobs,
                sample.values,
            )
            if array is not None
        ]
        return sum(array.nbytes for array in arrays)

    def end_wait(self) -> None:
        """Ends the span of its wait, if it waits."""
        if self.waiting is not None:
            self.waiting.end()
            self.waiting = None


def group_id(index: int) -> str:
    """The id of the group with this issue number."""
    return f"g{index:07d}"


def sample_seed(seed: int, index: int, slot: int) -> int:
    """A seed for one sample: a function of the run's seed, the group and the slot alone."""
    digest = hashlib.blake2b(f"{seed}/{index}/{slot}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


class GroupRunner:
    """Draws and scores groups.

    Args:
        fleet: the rollout servers.
        rewards: (name, weight, client) of each reward.
        reference: client of the reference, or None.
        teacher: client of the teacher of a distillation, or None.
        critic: client of the deployed critic, or None.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_id: str,
        tokenizer: Tokenizer,
        fleet: Fleet,
        rewards: Sequence[tuple[str, float, ScorerClient]],
        reference: TokenScorer | None,
        tracing: Tracing,
        *,
        teacher: TokenScorer | None = None,
        critic: ScorerClient | None = None,
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._rewards = rewards
        models: dict[str, TokenScorer | None] = {"reference": reference, "teacher": teacher, "critic": critic}
        #: Clients of the models that score tokens, by role.
        self.models = {role: client for role, client in models.items() if client is not None}
        self._tracing = tracing
        ending = {*tokenizer.eos_ids, *spec.rollout.stop_token_ids}
        self._stop_ids = () if spec.rollout.ignore_eos else tuple(sorted(ending))
        self.busy = BusyClock()  # time in which samples were drawn
        self.calls: Counter[str] = Counter()  # calls in progress by role, for the progress view
        self.scoring = 0  # groups whose samples are drawn and not scored yet
        self.drawn: Callable[[], Awaitable[None]] | None = None  # is told when a group needs the servers no more

    async def run(self, group: Group) -> None:
        """Fills ``group.samples``.

        Raises:
            NightshiftError: no sample could be had, or a scorer failed for good.
        """
        await self._generate(group)
        if not group.samples:
            cause = group.failures[0] if group.failures else "no answer"
            raise RoleError(f"group {group.group_id} has no usable sample: {cause}", role="rollout")
        self.scoring += 1
        try:
            if self.drawn is not None:
                await self.drawn()
            scorers = {"reference": self._ref, "teacher": self._teach, "critic": self._value}
            await together([self._reward(group), *(scorers[role](group) for role in self.models)])
        finally:
            self.scoring -= 1
        shape(group.samples, self._spec, bool(self._rewards))

    async def _generate(self, group: Group) -> None:
        with self.busy.work():
            await self._draw_all(group)

    async def _draw_all(self, group: Group) -> None:
        began = time.time()
        rollout = self._tracing.child("rollout", group.span, role="rollout", group_id=group.group_id)
        with self._tracing.within(rollout):
            drawn = await together(self._draw(group, rollout, slot) for slot in range(self._spec.rollout.n))
        group.samples = [sample for sample in drawn if sample is not None]
        group.intervals["rollout"] = (began, time.time())

    async def _draw(self, group: Group, parent: Span, slot: int) -> Sample | None:
        rollout = self._spec.rollout
        sample_id = f"{group.group_id}.{slot}"
        seed = sample_seed(self._spec.trainer.seed, group.index, slot) if self._spec.pipeline.deterministic else None
        span = self._tracing.child("generate", parent, role="rollout", sample_id=sample_id)
        with self._tracing.within(span) as traceparent:
            began = time.monotonic()
            request = GenerateRequest(
                request_id=f"{self._run_id}.{sample_id}",
                prompt_ids=group.prompt.prompt_ids,
                max_tokens=rollout.max_response_length,
                temperature=rollout.temperature,
                stop_token_ids=self._stop_ids,
                seed=seed,
                min_tokens=rollout.min_response_length,
                ignore_eos=rollout.ignore_eos,
                traceparent=traceparent,
            )
            try:
                answer = await self._fleet.generate(
                    request,
                    lambda attempt: self._tracing.within(
                        self._tracing.child("retry", span, role="rollout", sample_id=sample_id, attempt=attempt)
                    ),
                )
            except (InvalidAnswerError, EngineRefusedError) as error:
                group.failures.append(error.message)
                return None
            span.set_attributes(
                {
                    "gen_ai.operation.name": "text_completion",
                    "gen_ai.usage.input_tokens": len(request.prompt_ids),
                    "gen_ai.usage.output_tokens": len(answer.response_ids),
                    "gen_ai.response.finish_reasons": [answer.finish_reason],
                    "rl.policy_versions": [part.version for part in answer.versions],
                }
            )
        return self._sample(group, sample_id, answer, time.monotonic() - began)

    def _sample(self, group: Group, sample_id: str, answer: Generated, seconds: float) -> Sample:
        return Sample(
            sample_id=sample_id,
            group_id=group.group_id,
            trace_id=group.trace_id,
            prompt_ids=group.prompt.prompt_ids,
            response_ids=answer.response_ids,
            logprobs=answer.logprobs,
            loss_mask=np.ones(len(answer.response_ids), np.uint8),
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            response_text=self._tokenizer.decode(answer.response_ids, skip_special_tokens=True),
            generate_seconds=seconds,
        )

    async def _reward(self, group: Group) -> None:
        began = time.time()
        inputs = reward_inputs(group.prompt, group.samples)
        if not self._rewards:
            return
        rewards = rewards_for(self._spec, self._rewards, group.prompt.data_source)
        parts = await together(self._one_reward(group, name, client, inputs) for name, _, client in rewards)
        weights = [weight for _, weight, _ in rewards]
        names = [name for name, _, _ in rewards]
        peak = max((part.peak_memory_bytes for part in parts), default=0)
        for at, sample in enumerate(group.samples):
            sample.peak_memory_bytes = max(sample.peak_memory_bytes, peak)
            combine_rewards(sample, names, weights, [part.results[at] for part in parts])
        group.intervals["reward"] = (began, time.time())

    async def _one_reward(self, group: Group, name: str, client: ScorerClient, inputs: list[RewardInput]) -> Scored:
        span = self._tracing.child("reward", group.span, role="reward", reward=name)
        self.calls["reward"] += 1
        try:
            with self._tracing.within(span) as traceparent:
                return await client.score(inputs, traceparent)
        finally:
            self.calls["reward"] -= 1

    async def _ref(self, group: Group) -> None:
        for sample, values, seconds in await self._token_values(group, self.models["reference"]):
            sample.ref_logprobs, sample.ref_seconds = values, seconds

    async def _teach(self, group: Group) -> None:
        for sample, values, _ in await self._token_values(group, self.models["teacher"]):
            sample.teacher_logprobs = values

    async def _value(self, group: Group) -> None:
        """Values of the critic; for a response that was cut also that of the state after its last token."""
        cut = self._spec.algorithm.bootstrap_truncated
        for sample, values, seconds in await self._token_values(group, self.models["critic"], beyond=cut):
            tokens = len(sample.response_ids)
            sample.values, sample.value_seconds = values[:tokens], seconds
            sample.bootstrap_value = float(values[tokens]) if len(values) > tokens else 0.0

    async def _token_values(
        self, group: Group, client: TokenScorer, *, beyond: bool = False
    ) -> list[tuple[Sample, Floats, float]]:
        """A number for each response token, from a model.

        Args:
            beyond: one more for responses that the length limit cut: at the state after the last token. A state knows
                nothing of the token that comes next, so that any id can stand for it.
        """
        role, began = client.role, time.time()
        span = self._tracing.child(role, group.span, role=role)
        asked = {
            sample.sample_id: sample.response_ids
            if not (beyond and sample.truncated)
            else np.append(sample.response_ids, sample.prompt_ids[:1]).astype(np.int32)
            for sample in group.samples
            if len(sample.response_ids)
        }
        inputs = [
            SequenceInput(
                id=sample.sample_id,
                prompt_ids=sample.prompt_ids,
                response_ids=asked[sample.sample_id],
                temperature=self._spec.rollout.temperature,
            )
            for sample in group.samples
            if sample.sample_id in asked
        ]
        self.calls[role] += 1
        try:
            with self._tracing.within(span) as traceparent:
                scored = await client.score(inputs, traceparent) if inputs else None
        finally:
            self.calls[role] -= 1
        results = {result["id"]: result for result in scored.results} if scored else {}
        peak = scored.peak_memory_bytes if scored else 0
        if self._spec.tracking.debug_mode:
            group.tensors += tensors_told(role, results.values())
        found = []
        for sample in group.samples:
            name = sample.sample_id
            if name not in results:
                found.append((sample, np.zeros(0, np.float32), 0.0))
                continue
            sample.peak_memory_bytes = max(sample.peak_memory_bytes, peak)
            require_ids(results[name], {"id": name, "response_ids": asked[name]}, role)
            found.append((sample, np.asarray(results[name]["logprobs"], np.float32), scored.seconds if scored else 0.0))
        group.intervals[role] = (began, time.time())
        return found


def reward_inputs(prompt: Prompt, samples: Sequence[Sample]) -> list[RewardInput]:
    """What a reward sees of each sample."""
    return [
        RewardInput(
            id=sample.sample_id,
            prompt=prompt.prompt,
            response=sample.response_text,
            response_ids=sample.response_ids,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra_info=prompt.extra_info,
            finish_reason=sample.finish_reason,
        )
        for sample in samples
    ]


def combine_rewards(
    sample: Sample, names: Sequence[str], weights: Sequence[float], results: Sequence[dict[str, Any]]
) -> None:
    """Sets the weighted sum of the rewards; a sample that one of them could not score is unscored, never 0.

    Raises:
        NightshiftError: a score, a part of it or the sum is no finite number, or a result has another form.
    """
    total = 0.0
    for name, weight, result in zip(names, weights, results, strict=True):
        seconds, parts = result.get("seconds", 0.0), result.get("parts") or {}
        if not isinstance(parts, dict):
            raise _wrong_score(name, parts, sample, "a map of its parts")
        sample.reward_seconds = max(sample.reward_seconds, _finite(name, seconds, sample))
        for part, value in parts.items():
            sample.reward_parts[part if len(names) == 1 else f"{name}/{part}"] = _finite(name, value, sample)
        score = result.get("score")
        if score is None:
            sample.reward = None
            sample.reward_error = f"{result.get('error_type') or 'none'}: {result.get('error', '')}".strip()
            return
        value = _finite(name, score, sample)
        if len(names) > 1:
            sample.reward_parts[name] = value
        total += weight * value
    if not abs(total) <= _LARGEST:
        raise _wrong_score(" + ".join(name or "reward" for name in names), total, sample, "a finite float")
    sample.reward = total


def _finite(name: str, value: Any, sample: Sample) -> float:
    """A number that a reward answered with: what float32 holds, since squares of it are taken in float64."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise _wrong_score(name, value, sample, "a finite float")
    return float(value)


def _wrong_score(name: str, value: Any, sample: Sample, wanted: str) -> NightshiftError:
    return NightshiftError(
        f"{name} answered {str(value)[:80] if not isinstance(value, str) else repr(value[:80])} for "
        f"{sample.sample_id}: expected {wanted}",
        role="reward",
    )


def start_group_span(
    tracing: Tracing, index: int, prompt: Prompt, epoch: int, trace_id: str | None = None
) -> tuple[Span, str]:
    """The root span of a group and its trace id; a group that is made again keeps its trace."""
    span = tracing.group(trace_id, group_id=group_id(index), row_id=str(prompt.row_id), epoch=epoch)
    return span, f"{span.get_span_context().trace_id:032x}"
