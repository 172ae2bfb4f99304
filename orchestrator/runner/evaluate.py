"""Evaluation on held-out prompts by the rollout servers, with greedy decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from nightshift.config import JobSpec
from nightshift.data import Prompt, Tokenizer
from nightshift.wire.experience import Sample
from orchestrator.runner.answers import EngineRefusedError, GenerateRequest, InvalidAnswerError
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.group import combine_rewards, reward_inputs
from orchestrator.runner.scorer import ScorerClient
from orchestrator.runner.shaping import rewards_for
from orchestrator.runner.together import together
from orchestrator.runner.tracing import Tracing


class Evaluator:
    """Scores one greedy response to each held-out prompt."""

    def __init__(
        self,
        spec: JobSpec,
        run_id: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        fleet: Fleet,
        rewards: Sequence[tuple[str, float, ScorerClient]],
        tracing: Tracing,
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._fleet = fleet
        self._rewards = rewards
        self._tracing = tracing
        self._stop_ids = tuple(sorted({*tokenizer.eos_ids, *spec.rollout.stop_token_ids}))

    @property
    def enabled(self) -> bool:
        """Whether there are held-out prompts."""
        return bool(self._prompts)

    async def run(self, step: int, version: str) -> dict[str, float]:
        """Mean score over all held-out prompts (never the mean of batch means), with how many could be scored.

        Raises:
            RoleError: a role is away, or refuses.
        """
        began = time.monotonic()
        span = self._tracing.job_span("evaluate", step=step, policy_version=version)
        with self._tracing.within(span) as traceparent:
            answers = await together(
                self._one(at, prompt, step, traceparent) for at, prompt in enumerate(self._prompts)
            )
            drawn = [(prompt, answer) for prompt, answer in zip(self._prompts, answers, strict=True) if answer]
            samples = [answer for _, answer in drawn]
            inputs = [item for prompt, sample in drawn for item in reward_inputs(prompt, [sample])]
            scored = await together(client.score(inputs, traceparent) for _, _, client in self._rewards if inputs)
        results = {name: answer.results for (name, _, _), answer in zip(self._rewards, scored, strict=False)}
        for at, (prompt, sample) in enumerate(drawn):
            chosen = rewards_for(self._spec, self._rewards, prompt.data_source) if self._rewards else []
            names, weights = [name for name, _, _ in chosen], [weight for _, weight, _ in chosen]
            if chosen:
                combine_rewards(sample, names, weights, [results[name][at] for name in names])
        scores = [sample.reward for sample in samples if sample.reward is not None]
        lengths = [len(sample.response_ids) for sample in samples]
        return {
            "eval/score": float(np.mean(scores)) if scores else float("nan"),
            "eval/scored": float(len(scores)),
            "eval/prompts": float(len(self._prompts)),
            "eval/response_length": float(np.mean(lengths)) if lengths else float("nan"),
            "eval/seconds": time.monotonic() - began,
        }

    async def _one(self, at: int, prompt: Prompt, step: int, traceparent: str) -> Sample | None:
        request = GenerateRequest(
            request_id=f"{self._run_id}.eval{step}.{at}",
            prompt_ids=prompt.prompt_ids,
            max_tokens=self._spec.rollout.max_response_length,
            temperature=0.0,
            stop_token_ids=self._stop_ids,
            traceparent=traceparent,
        )
        try:
            answer = await self._fleet.generate(request)
        except (InvalidAnswerError, EngineRefusedError):
            return None  # counted: eval/scored stays below eval/prompts
        return Sample(
            sample_id=f"eval.{at}",
            group_id=f"eval.{at}",
            trace_id=self._tracing.job_trace_id,
            prompt_ids=prompt.prompt_ids,
            response_ids=answer.response_ids,
            logprobs=answer.logprobs,
            loss_mask=np.ones(len(answer.response_ids), np.uint8),
            versions=answer.versions,
            finish_reason=answer.finish_reason,
            response_text=self._tokenizer.decode(answer.response_ids, skip_special_tokens=True),
        )
