"""The critic of a run: its trainer, and the deployment that serves its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from nightshift.algorithms import REGISTRY, AdvantageReport, compute_advantages
from nightshift.config import JobSpec
from nightshift.config.scorers import CriticConfig
from nightshift.wire import codec
from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import LossSpec, Sample
from orchestrator.runner.scorer import ScorerClient
from orchestrator.runner.trainer import TrainerClient

#: Name of the critic's loss in a loss specification.
_LOSS = "value"


class Critic:
    """Keeps trainer and deployment at one version.

    Its weights carry the version of the policy's step, so that a checkpoint holds both or none.

    Args:
        trainer: of the value model.
        scorer: its deployment.
    """

    def __init__(self, spec: JobSpec, trainer: TrainerClient, scorer: ScorerClient) -> None:
        if spec.scorers.critic is None:
            raise BadInputError("the job has no critic", role="critic", fix="Give scorers.critic")
        self._spec = spec
        self._config: CriticConfig = spec.scorers.critic
        self._trainer = trainer
        self._scorer = scorer
        self.tensors: list[dict[str, Any]] = []  # of the last update, where they were asked for
        #: What the schedule says of the last update: see :class:`nightshift.wire.schedule.StepRecord`.
        self.made: dict[str, Any] = {}
        self._digest = ""  # of the weights that were published last

    @property
    def learning_rate(self) -> float:
        """Peak of the critic's schedule."""
        return self._config.learning_rate

    async def advantages(self, samples: Sequence[Sample], policy: TrainerClient, version: str) -> AdvantageReport:
        """Sets advantages and returns of a batch whose samples have values.

        Args:
            policy: asked for log-probs where the estimator compares the policy that is trained with the one that
                sampled.
            version: of its weights.
        """
        config = self._spec.algorithm
        estimator = REGISTRY.get(config.estimator)
        target = None
        if estimator is not None and estimator.needs_target:
            target = await policy.log_probs(samples, self._spec.rollout.temperature, version, "")
        return compute_advantages(
            samples,
            config,
            values=[sample.values if sample.values is not None else np.zeros(0, np.float32) for sample in samples],
            bootstraps=[sample.bootstrap_value for sample in samples],
            target_logprobs=target,
        )

    def warming_up(self, step: int) -> bool:
        """Whether the step after ``step`` trains the critic alone."""
        return step < self._config.warmup_steps

    async def load(self, state_dir: str, version: str) -> None:
        """Loads a resume state, or with an empty folder names the initial weights."""
        await self._trainer.load(state_dir, version)

    async def save(self, state_dir: str, step: int, traceparent: str) -> None:
        """Writes the resume state; the checkpoint's commit, that of the policy's state, comes after it."""
        await self._trainer.save({"step": step}, state_dir=state_dir, export_dir="", traceparent=traceparent)

    async def publish(self, version: str, traceparent: str = "") -> float:
        """Brings the trainer's weights to the deployment, which takes them with its next call; returns seconds."""
        publication = await self._trainer.publish(version, [], traceparent)
        self._scorer.weights = codec.pack(publication.update_info)
        self._digest = publication.digest
        return publication.seconds

    async def update(
        self,
        samples: Sequence[Sample],
        *,
        step: int,
        expect: str,
        new: str,
        rate: float,
        traceparent: str,
        debug: bool = False,
    ) -> dict[str, float]:
        """Makes one step of the critic on a batch whose samples have values and returns, and publishes it.

        Args:
            rate: learning rate of the step.
            debug: asks for its tensors.

        Returns:
            Metrics of the step.
        """
        options = {} if self._config.value_clip is None else {"value_clip": self._config.value_clip}
        spec = LossSpec(
            policy_loss=_LOSS,
            aggregation=self._config.loss_aggregation,
            total_tokens=sum(sample.trained_tokens for sample in samples),
            total_sequences=sum(1 for sample in samples if sample.trained_tokens),
            options=options,
        )
        # What the critic learns from, and nothing else, goes over the wire.
        slim = [replace(sample, advantages=None, ref_logprobs=None, teacher_logprobs=None) for sample in samples]
        updated = await self._trainer.update(
            slim, spec, step=step, expect=expect, new=new, learning_rate=rate, traceparent=traceparent, debug=debug
        )
        self.tensors = updated.tensors
        names = {"grad_norm": "critic/grad_norm", "lr": "critic/lr"}
        kept = ("loss/critic", "critic/clip_fraction", *names)
        metrics = {names.get(name, name): updated.metrics[name] for name in kept if name in updated.metrics}
        metrics["timing/update_critic"] = updated.seconds
        metrics["memory/critic_peak_bytes"] = float(updated.peak_memory_bytes)
        metrics["timing/publish_critic"] = await self.publish(new, traceparent)
        self.made = {"learning_rate": rate, "loss": asdict(spec), "digest": self._digest}
        return metrics


def value_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """How good the values were that the advantages of a batch were computed from.

    ``critic/explained_variance`` is 1 - Var(returns - values) / Var(returns) over trained tokens: 1 for a critic that
    knows the return, 0 for one that knows its mean, less for one that is worse than that. Without variance in the
    returns it is left out.
    """
    pairs = [
        (sample.values[sample.loss_mask > 0], sample.returns[sample.loss_mask > 0])
        for sample in samples
        if sample.values is not None and sample.returns is not None and sample.reward is not None
    ]
    if not pairs or not sum(len(values) for values, _ in pairs):
        return {}
    values = np.concatenate([part for part, _ in pairs]).astype(np.float64)
    returns = np.concatenate([part for _, part in pairs]).astype(np.float64)
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    spread = float(returns.var())
    if spread > 0:
        metrics["critic/explained_variance"] = 1.0 - float((returns - values).var()) / spread
    return metrics
