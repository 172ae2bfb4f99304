"""From the rewards of a batch to the advantage of each token."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nightshift.algorithms.batch import AdvantageBatch, Doubles, Valued, has_spread
from nightshift.algorithms.gae import gae
from nightshift.algorithms.kl import kl_kind, kl_terms
from nightshift.algorithms.metrics import mean_of_valid
from nightshift.algorithms.registry import REGISTRY, Estimator, find_estimator
from nightshift.algorithms.whiten import whiten_batch
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError
from nightshift.wire.experience import Sample

_custom = functools.lru_cache(maxsize=16)(find_estimator)


@dataclass(frozen=True, slots=True)
class AdvantageReport:
    """What was counted while a batch's advantages were computed.

    Attributes:
        samples: samples of the batch.
        valid: samples with a finite reward and at least one trained token.
        unscored: samples without a reward, those with a NaN or infinite one included.
        non_finite: samples whose reward is NaN or infinite.
        empty: samples without a trained token; they take no part in their group.
        groups: prompt groups.
        single_groups: groups with fewer than two valid samples: nothing to compare, advantage 0.
        zero_spread_groups: groups of two or more valid samples whose rewards are all equal.
        mean_reward: mean over the valid samples, NaN without any.
        clamped: tokens whose log-ratio was clamped in the KL penalty of the reward.
        mean_kl: mean KL estimate of the penalty per trained token; NaN where the reward has no penalty.
        kl_tokens: tokens that ``mean_kl`` is over.
    """

    samples: int
    valid: int
    unscored: int
    non_finite: int
    empty: int
    groups: int
    single_groups: int
    zero_spread_groups: int
    mean_reward: float
    clamped: int = 0
    mean_kl: float = math.nan
    kl_tokens: int = 0

    def __add__(self, other: AdvantageReport) -> AdvantageReport:
        """The report on both, which hold different groups of one batch."""
        both = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return AdvantageReport(
            **both,
            mean_reward=_mean_of_means((self.mean_reward, self.valid), (other.mean_reward, other.valid)),
            mean_kl=_mean_of_means((self.mean_kl, self.kl_tokens), (other.mean_kl, other.kl_tokens)),
        )

    @property
    def zero_spread_share(self) -> float:
        """Share of the groups that have two or more valid samples in which all rewards are equal; 0 without any."""
        compared = self.groups - self.single_groups
        return self.zero_spread_groups / compared if compared else 0.0


_COUNTS = tuple(f.name for f in fields(AdvantageReport) if not f.name.startswith("mean_"))


def _mean_of_means(*parts: tuple[float, int]) -> float:
    """The mean over all, of means over so many each; NaN where there is nothing."""
    counted = [(mean, count) for mean, count in parts if count]
    return sum(mean * count for mean, count in counted) / sum(count for _, count in counted) if counted else math.nan


def compute_advantages(
    samples: Sequence[Sample],
    config: AlgorithmConfig,
    *,
    values: Sequence[NDArray[np.floating]] | None = None,
    bootstraps: ArrayLike | None = None,
    target_logprobs: Sequence[NDArray[np.floating]] | None = None,
) -> AdvantageReport:
    """Sets ``advantages`` of each sample: [T] float32, 0 where the token is masked or the sample unscored.

    With a critic's values it also sets ``returns``, what the critic is trained towards.

    Samples are grouped by ``group_id``, wherever they stand in the batch; their order stays. Computed in float64.

    Args:
        samples: the whole batch. An estimator that is not ``whole_batch`` gives the same for whole groups of it.
        config: section ``algorithm`` of the job.
        values: N arrays [T_i] from a critic, for estimators that need them.
        bootstraps: [N] value after the last token. Used for truncated samples (by their finish reason) where
            ``algorithm.bootstrap_truncated`` is set; all others ended, and nothing follows.
        target_logprobs: N arrays [T_i], log-probs under the policy that is trained, for V-trace.

    Raises:
        BadInputError: unknown estimator, or one without the values it needs.
        RoleError: a scored sample has no reference log-probs, and the KL term stands in the reward.
        NightshiftError: an estimator of the user's raised, or returned something unusable; the message names it.
    """
    estimator = REGISTRY.get(config.estimator) or _custom(config.estimator)
    batch, report = _make_batch(samples, config, values, bootstraps)
    if target_logprobs is not None:
        targets = [np.asarray(array, np.float32) for array in target_logprobs]
        _check_shapes(samples, targets, "target log-probs", "trainer")
        batch = replace(batch, target_logprobs=targets)
    results, returns = _run(estimator, batch, config)
    if config.whiten_advantages:
        places = [mask if on else np.zeros_like(mask) for mask, on in zip(batch.masks, batch.scored, strict=True)]
        results = list(whiten_batch(results, places))
    for sample, result, scored in zip(samples, results, batch.scored, strict=True):
        sample.advantages = result.astype(np.float32) if scored else np.zeros(len(sample.response_ids), np.float32)
    if batch.values is not None:
        for sample, wanted, scored in zip(samples, returns or _plain_returns(batch, config), batch.scored, strict=True):
            sample.returns = wanted.astype(np.float32) if scored else np.zeros(len(sample.response_ids), np.float32)
    return report


def loss_kl_coef(config: AlgorithmConfig) -> float:
    """Weight of the KL term in the loss: 0 where the reward already carries it."""
    return config.kl_coef if config.kl_in == "loss" else 0.0


def needs_whole_batch(config: AlgorithmConfig) -> bool:
    """Whether advantages can only be computed once the whole batch is there, and not group by group.

    Runs no code of the user's: an estimator of theirs gets the whole batch.
    """
    estimator = REGISTRY.get(config.estimator)
    return config.whiten_advantages or estimator is None or estimator.whole_batch


def _make_batch(
    samples: Sequence[Sample],
    config: AlgorithmConfig,
    values: Sequence[NDArray[np.floating]] | None,
    bootstraps: ArrayLike | None,
) -> tuple[AdvantageBatch, AdvantageReport]:
    raw = np.array([np.nan if sample.reward is None else sample.reward for sample in samples], np.float64)
    finite = np.isfinite(raw)
    trained = np.array([sample.loss_mask.any() for sample in samples], np.bool_)
    valid = finite & trained
    rewards = np.where(valid, raw, np.nan)
    numbers: dict[str, int] = {}
    group_index = np.array([numbers.setdefault(sample.group_id, len(numbers)) for sample in samples], np.intp)
    token_rewards, penalties, clamped = _token_rewards(samples, rewards, config)
    with_reference = all(sample.ref_logprobs is not None for sample in samples)
    batch = AdvantageBatch(
        rewards=rewards,
        group_index=group_index,
        masks=[sample.loss_mask for sample in samples],
        token_rewards=token_rewards,
        logprobs=[sample.logprobs for sample in samples],
        ref_logprobs=[s.ref_logprobs for s in samples if s.ref_logprobs is not None] if with_reference else None,
        values=None if values is None else _check_shapes(samples, values, "values", "critic"),
        bootstraps=_bootstraps(samples, config, values, bootstraps),
        teacher_logprobs=_teacher(samples),
    )
    groups = [rewards[members] for members in batch.groups()]
    single = sum(int((~np.isnan(group)).sum()) < 2 for group in groups)
    report = AdvantageReport(
        samples=len(samples),
        valid=int(valid.sum()),
        unscored=int((~finite).sum()),
        non_finite=sum(sample.reward is not None and not math.isfinite(sample.reward) for sample in samples),
        empty=int((~trained).sum()),
        groups=len(groups),
        single_groups=single,
        zero_spread_groups=sum(not has_spread(group) for group in groups) - single,
        mean_reward=mean_of_valid(rewards.tolist()),
        clamped=clamped,
        mean_kl=float(np.concatenate(penalties).mean()) if penalties else math.nan,
        kl_tokens=sum(map(len, penalties)),
    )
    return batch, report


def _token_rewards(
    samples: Sequence[Sample], rewards: Doubles, config: AlgorithmConfig
) -> tuple[list[Doubles], list[Doubles], int]:
    """Token rewards of each sample, the KL estimates of the trained tokens, and the number of clamped ones."""
    penalised = config.kl_in == "reward" and config.kl_coef > 0
    result, penalties, clamped = [], [], 0
    for sample, reward in zip(samples, rewards.tolist(), strict=True):
        tokens = np.zeros(len(sample.response_ids))
        if not math.isnan(reward):
            if penalised:
                if sample.ref_logprobs is None:
                    raise RoleError(
                        f"sample {sample.sample_id} has no reference log-probs, which algorithm.kl_in 'reward' needs",
                        role="reference",
                    )
                kind = kl_kind(config.kl_estimator)
                terms, cut = kl_terms(sample.logprobs, sample.ref_logprobs, sample.loss_mask, kind)
                tokens -= config.kl_coef * terms
                penalties.append(terms[np.flatnonzero(sample.loss_mask)].astype(np.float64))
                clamped += cut
            last = -1 if sample.loss_mask[-1] else np.flatnonzero(sample.loss_mask)[-1]
            tokens[last] += reward
        result.append(tokens)
    return result, penalties, clamped


def _teacher(samples: Sequence[Sample]) -> list[NDArray[np.float32]] | None:
    found = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
    return found if samples and len(found) == len(samples) else None


def _check_shapes(
    samples: Sequence[Sample], arrays: Sequence[NDArray[np.floating]], what: str, role: str
) -> Sequence[NDArray[np.floating]]:
    if len(arrays) != len(samples):
        raise RoleError(f"{what} of {len(arrays)} samples came for {len(samples)} samples", role=role)
    for sample, array in zip(samples, arrays, strict=True):
        if array.shape != sample.loss_mask.shape:
            raise RoleError(
                f"{what} of sample {sample.sample_id} have shape {array.shape}, expected {sample.loss_mask.shape}",
                role=role,
            )
    return arrays


def _plain_returns(batch: AdvantageBatch, config: AlgorithmConfig) -> list[Doubles]:
    """Lambda-returns, as the critic's targets under an estimator that names none."""
    return gae(
        batch.token_rewards,
        batch.values or [],
        batch.masks,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        bootstraps=batch.bootstraps,
    )[1]


def _bootstraps(
    samples: Sequence[Sample],
    config: AlgorithmConfig,
    values: Sequence[NDArray[np.floating]] | None,
    bootstraps: ArrayLike | None,
) -> Doubles:
    truncated = np.array([sample.truncated for sample in samples], np.bool_)
    if values is None or not config.bootstrap_truncated or not truncated.any():
        return np.zeros(len(samples))
    if bootstraps is None:
        raise BadInputError("algorithm.bootstrap_truncated needs the value after the last token of each sample")
    return np.where(truncated, np.asarray(bootstraps, np.float64), 0.0)


def _run(
    estimator: Estimator, batch: AdvantageBatch, config: AlgorithmConfig
) -> tuple[list[Doubles], list[Doubles] | None]:
    """Advantages as N float64 arrays [T_i], 0 where masked; and the values' targets, where the estimator names any."""
    name = f"algorithm.estimator {config.estimator!r}"
    try:
        result = estimator.function(batch, config)
    except NightshiftError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise NightshiftError(f"{name} raised {type(error).__name__}: {error}", role="job") from error
    if result is None or not hasattr(result, "__len__") or len(result) != len(batch):
        found = f"{len(result)} values" if hasattr(result, "__len__") else type(result).__name__
        raise NightshiftError(f"{name} returned {found} for {len(batch)} samples", role="job")
    if isinstance(result, Valued):
        return _arrays(result.advantages, batch, name), _arrays(result.targets, batch, name)
    return _arrays(result, batch, name), None


def _arrays(result: Any, batch: AdvantageBatch, name: str) -> list[Doubles]:
    arrays = []
    for index, (mask, scored) in enumerate(zip(batch.masks, batch.scored, strict=True)):
        try:
            value = np.asarray(result[index], np.float64)
        except (TypeError, ValueError) as error:
            raise NightshiftError(f"{name} returned {result[index]!r} for sample {index}", role="job") from error
        if value.shape not in ((), mask.shape):
            raise NightshiftError(
                f"{name} returned shape {value.shape} for sample {index}, expected one number or {mask.shape}",
                role="job",
            )
        tokens = np.where(mask > 0, value, 0.0) if scored else np.zeros(mask.shape)
        if scored and not (np.isfinite(tokens).all() if value.shape else math.isfinite(value)):
            raise NightshiftError(f"{name} returned a value that is not finite for sample {index}", role="job")
        arrays.append(tokens)
    return arrays
