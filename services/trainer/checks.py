"""Checks of what an update asks for, before any rank sees it. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nightshift.config.algorithm import POLICY_LOSSES as POLICY_LOSS_NAMES
from nightshift.config.algorithm import PREFERENCE_LOSSES
from nightshift.config.functions import is_reference
from nightshift.wire.errors import BadInputError, RoleError
from nightshift.wire.experience import LossSpec, Sample
from nightshift.wire.scoring import SequenceInput
from services.trainer.aggregate import AGGREGATIONS

#: Name of the critic's loss in a loss specification.
VALUE_LOSS = "value"
KL_ESTIMATORS = ("k1", "k2", "k3", "k1_st", "k3_st")
#: What a preference loss is summed up by: its tokens carry shares of their pair's loss.
PREFERENCE_AGGREGATION = "seq_mean_token_sum"
# Importance weights correct for the behaviour policy, which a loss with a ratio against it already does.
_IMPORTANCE = frozenset(
    {"importance_cap", "importance_floor", "importance_mask", "sequence_importance_cap", "sequence_importance_mask"}
)
_OPTIONS = _IMPORTANCE | {"dual_clip", "behaviour_cap", "beta", "label_smoothing", "value_clip"}


class NonFiniteGradientError(RoleError):
    """The gradient holds NaN or infinity; the optimiser step was not made."""


def check_loss_spec(spec: LossSpec) -> None:
    """Checks names and ranges of a loss specification.

    Raises:
        BadInputError: the message names the field and what would be right.
    """
    known = (*POLICY_LOSS_NAMES, *PREFERENCE_LOSSES, VALUE_LOSS)
    if spec.policy_loss not in known and not is_reference(spec.policy_loss):
        raise _bad(f"unknown policy loss {spec.policy_loss!r}", f"Choose one of {', '.join(known)}")
    if spec.aggregation not in AGGREGATIONS:
        raise _bad(f"unknown loss aggregation {spec.aggregation!r}", f"Choose one of {', '.join(AGGREGATIONS)}")
    if spec.aggregation == "constant_length" and spec.constant_length < 1:
        raise _bad(f"constant_length is {spec.constant_length}", "It must be 1 or more with that aggregation")
    if spec.kl_estimator not in KL_ESTIMATORS:
        raise _bad(f"unknown KL estimator {spec.kl_estimator!r}", f"Choose one of {', '.join(KL_ESTIMATORS)}")
    if not spec.temperature > 0:
        raise _bad(f"temperature is {spec.temperature}", "It must be positive")
    unknown = sorted(set(spec.options) - _OPTIONS)
    if unknown and not is_reference(spec.policy_loss):
        raise _bad(f"unknown loss option {unknown[0]!r}", f"Known are {', '.join(sorted(_OPTIONS))}")
    if spec.policy_loss in PREFERENCE_LOSSES:
        if not spec.options.get("beta", 0.0) > 0:
            raise _bad(f"beta is {spec.options.get('beta')}", f"It must be positive with {spec.policy_loss}")
        if spec.aggregation != PREFERENCE_AGGREGATION:
            message = f"loss aggregation {spec.aggregation!r} with the loss {spec.policy_loss!r}"
            raise _bad(message, f"Use {PREFERENCE_AGGREGATION}")
        return
    if "behaviour_cap" in spec.options and spec.policy_loss != "decoupled_ppo":
        raise _bad(f"behaviour_cap with the policy loss {spec.policy_loss!r}", "Use policy_loss decoupled_ppo")
    if POLICY_LOSS_NAMES.get(spec.policy_loss, spec.policy_loss == VALUE_LOSS) and _IMPORTANCE & set(spec.options):
        raise _bad(
            f"importance weights with the policy loss {spec.policy_loss!r}, which corrects for the sampler already",
            "Use policy_loss ppo_clip_proximal",
        )


def check_samples(samples: Sequence[Sample], spec: LossSpec, vocab_size: int, max_positions: int) -> None:
    """Checks that samples can be trained on.

    Raises:
        BadInputError: the message names the sample, the field and the value.
    """
    check_pairs(samples, spec)
    for sample in samples:
        name = f"sample {sample.sample_id}"
        check_ids(name, sample.prompt_ids, sample.response_ids, vocab_size, max_positions)
        if spec.policy_loss == VALUE_LOSS:
            if sample.values is None or sample.returns is None:
                raise _bad(f"{name} has no values or no returns", "Ask the critic, and compute the advantages")
            continue
        if sample.advantages is None:
            raise _bad(f"{name} has no advantages", "Compute them before the update")
        if not np.isfinite(sample.advantages).all():
            raise _bad(f"{name} has an advantage that is not finite", "Leave unscored samples at 0")
        preference = spec.policy_loss in PREFERENCE_LOSSES
        if spec.kl_coef or preference:
            if sample.ref_logprobs is None:
                why = f"the loss is {spec.policy_loss}" if preference else f"kl_coef is {spec.kl_coef}"
                raise _bad(f"{name} has no reference log-probs, but {why}", "Ask the reference")
            if not np.isfinite(sample.ref_logprobs).all():
                raise _bad(f"{name} has a reference log-prob that is not finite", "Check the reference")


def check_pairs(samples: Sequence[Sample], spec: LossSpec) -> None:
    """Checks that the samples of a preference loss are pairs: chosen, rejected, chosen, rejected, ...

    Raises:
        BadInputError: a sample without its partner, or without a trained token.
    """
    if spec.policy_loss not in PREFERENCE_LOSSES:
        return
    if len(samples) % 2:
        raise _bad(f"{len(samples)} samples are no pairs", f"{spec.policy_loss} takes chosen and rejected in turn")
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        if chosen.group_id != rejected.group_id:
            raise _bad(f"samples {chosen.sample_id} and {rejected.sample_id} are no pair", "Pairs share a group_id")
        for sample in (chosen, rejected):
            if not sample.trained_tokens:
                raise _bad(f"sample {sample.sample_id} of a pair has no trained token", "Leave the pair out")


def check_sequences(sequences: Sequence[SequenceInput], vocab_size: int, max_positions: int) -> None:
    """Checks that log-probs of sequences can be taken.

    Raises:
        BadInputError: the message names the sequence and the value.
    """
    for item in sequences:
        name = f"sequence {item['id']}"
        check_ids(name, item["prompt_ids"], item["response_ids"], vocab_size, max_positions)
        if not item.get("temperature", 1.0) > 0:
            raise _bad(f"{name} has temperature {item.get('temperature')}", "It must be positive")


def check_ids(name: str, prompt: np.ndarray, response: np.ndarray, vocab_size: int, max_positions: int) -> None:
    """Checks one pair of id arrays against the model's vocabulary and positions.

    Raises:
        BadInputError: empty prompt, id outside the vocabulary, or too long a sequence.
    """
    if len(prompt) == 0:
        raise _bad(f"{name} has an empty prompt", "The first response token needs a token before it")
    for ids in (prompt, response):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise _bad(
                f"{name} has a token id outside the model's vocabulary of {vocab_size}",
                "Sampler and trainer must use one tokenizer",
            )
    if len(prompt) + len(response) > max_positions:
        raise _bad(
            f"{name} has {len(prompt) + len(response)} tokens, the model has {max_positions} positions",
            "Lower data.max_prompt_length or rollout.max_response_length",
        )


def _bad(message: str, fix: str) -> BadInputError:
    return BadInputError(message, role="trainer", fix=fix)
