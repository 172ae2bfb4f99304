"""From ready groups to what the trainer gets, and the step's metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nightshift.algorithms.advantages import AdvantageReport, loss_kl_coef
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.errors import NightshiftError, RoleError
from nightshift.wire.experience import LossSpec, Sample
from orchestrator.runner.group import Group


def trainable(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that a gradient can come from: scored, and with at least one trained token."""
    return [sample for sample in samples if sample.reward is not None and sample.trained_tokens > 0]


def loss_spec(config: AlgorithmConfig, samples: Sequence[Sample], temperature: float, constant_length: int) -> LossSpec:
    """The loss of a whole batch, with the denominators that partial sums are divided by.

    For the first parts of a batch, whose totals nobody knows yet, ``samples`` is empty: the trainer then leaves the
    division to the last part, which carries them.
    """
    return LossSpec(
        policy_loss=config.policy_loss,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl_coef=loss_kl_coef(config),
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        aggregation=config.loss_aggregation,
        temperature=temperature,
        total_tokens=sum(sample.trained_tokens for sample in samples),
        total_sequences=sum(1 for sample in samples if sample.trained_tokens > 0),
        constant_length=constant_length,
        options=config.loss_options,
    )


def whole_passes(samples: Sequence[int], quantum: int) -> int:
    """How many groups of a run of them go into a part, so that the trainer's passes are full.

    Args:
        samples: number of samples of each group that could go, in order.
        quantum: samples of one pass over all ranks.

    Returns:
        Groups, from the front: the most whose samples are a multiple of ``quantum``; all of them where no number is
        but they fill one pass; 0 where they do not.
    """
    total = full = 0
    for count, of_group in enumerate(samples, start=1):
        total += of_group
        if total and total % quantum == 0:
            full = count
    return full or (len(samples) if total >= quantum else 0)


def check_budget(groups: Sequence[Group], n: int, budget: float, failures: Sequence[NightshiftError] = ()) -> None:
    """Fails where too many samples of a batch are unscored or could not be had.

    Args:
        groups: the batch.
        n: samples of a group.
        budget: share of samples that may be missing, 0..1.
        failures: why further groups failed as a whole since the batch before.

    Raises:
        RoleError: the share is above the budget; quotes the first cause.
    """
    wanted = (len(groups) + len(failures)) * n
    unscored = [sample for group in groups for sample in group.samples if sample.reward is None]
    lost = [cause for group in groups for cause in group.failures]
    if not wanted or (len(unscored) + len(lost) + len(failures) * n) / wanted <= budget:
        return
    if len(failures) * n >= max(len(unscored), len(lost)):
        raise RoleError(
            f"{len(failures)} of {len(groups) + len(failures)} prompt groups failed, the first because "
            f"{failures[0].message}",
            role=failures[0].role or "rollout",
            fix=f"Look at that role, or raise pipeline.failure_budget (now {budget:g})",
        )
    if len(unscored) >= len(lost):
        raise RoleError(
            f"{len(unscored)} of {wanted} samples of the batch are unscored, the first ({unscored[0].sample_id}) by "
            f"{unscored[0].reward_error}",
            role="reward",
            fix=f"Correct the reward, or raise pipeline.failure_budget (now {budget:g})",
        )
    raise RoleError(
        f"{len(lost)} of {wanted} samples of the batch could not be had, the first cause being: {lost[0]}",
        role="rollout",
        fix=f"Look at the server, or raise pipeline.failure_budget (now {budget:g})",
    )


def batch_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Rewards, lengths and staleness of a batch. ``step`` is the step, from 0, whose weights it trains."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples if sample.reward is not None], np.float64)
    lengths = np.array([len(sample.response_ids) for sample in samples], np.float64)
    ages = np.array([step - group.oldest_version for group in groups], np.float64)
    metrics: dict[str, float] = {
        "samples": len(samples),
        "reward/valid": len(rewards),
        "reward/unscored": len(samples) - len(rewards),
        "response_length/truncated_share": float(np.mean([sample.truncated for sample in samples])) if samples else 0.0,
        "rollout/failed_samples": sum(len(group.failures) for group in groups),
    }
    if len(rewards):
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    for name, values in (("response_length", lengths), ("staleness", ages)):
        if len(values):
            metrics |= {
                f"{name}/mean": float(values.mean()),
                f"{name}/min": float(values.min()),
                f"{name}/max": float(values.max()),
            }
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(name, []).append(value)
    metrics |= {f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()}
    return metrics


def dropped_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How many groups were dropped as too old, and how long the samples of those were that had ended."""
    lengths = [len(sample.response_ids) for group in groups for sample in group.samples]
    metrics = {"staleness/dropped_groups": float(len(groups))}
    if lengths:
        metrics["staleness/dropped_length/mean"] = float(np.mean(lengths))
    return metrics


def advantage_metrics(report: AdvantageReport) -> dict[str, float]:
    """What the advantage stage counted."""
    metrics = {
        "advantage/zero_spread_share": report.zero_spread_share,
        "advantage/single_groups": float(report.single_groups),
        "advantage/empty_samples": float(report.empty),
        "advantage/clamped_tokens": float(report.clamped),
    }
    if math.isfinite(report.mean_kl):
        metrics["kl_penalty"] = report.mean_kl
    return metrics


def rollout_rows(groups: Sequence[Group], step: int, version: str) -> list[dict[str, Any]]:
    """One row per sample for the stored rollouts."""
    rows = []
    for group in groups:
        prompt = group.prompt.prompt
        for sample in group.samples:
            rows.append(
                {
                    "step": step,
                    "trained_version": version,
                    "group_id": group.group_id,
                    "sample_id": sample.sample_id,
                    "row_id": str(group.prompt.row_id),
                    "epoch": group.epoch,
                    "trace_id": sample.trace_id,
                    "prompt_text": prompt if isinstance(prompt, str) else _dialogue(prompt),
                    "response_text": sample.response_text,
                    "reward": sample.reward,
                    "reward_error": sample.reward_error,
                    "finish_reason": sample.finish_reason,
                    "prompt_tokens": len(sample.prompt_ids),
                    "response_tokens": len(sample.response_ids),
                    "versions": [span.version for span in sample.versions],
                    "version_starts": [span.start for span in sample.versions],
                    "prompt_ids": sample.prompt_ids,
                    "response_ids": sample.response_ids,
                    "logprobs": sample.logprobs,
                    "loss_mask": sample.loss_mask,
                    "ref_logprobs": sample.ref_logprobs,
                    "advantages": sample.advantages,
                    "values": sample.values,
                    "bootstrap_value": None if sample.values is None else sample.bootstrap_value,
                    "returns": sample.returns,
                    "teacher_logprobs": sample.teacher_logprobs,
                    "generate_seconds": sample.generate_seconds,
                    "reward_seconds": sample.reward_seconds,
                    "reference_seconds": sample.ref_seconds,
                    "critic_seconds": None if sample.values is None else sample.value_seconds,
                    "peak_memory_bytes": sample.peak_memory_bytes or None,
                }
            )
    return rows


def _dialogue(messages: Any) -> str:
    if not isinstance(messages, list):
        return str(messages)
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in messages if isinstance(turn, dict))
