"""Advantage estimators by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nightshift.algorithms import estimators
from nightshift.algorithms.batch import AdvantageBatch, Valued
from nightshift.algorithms.custom import check_custom, load_custom
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.config.functions import is_reference
from nightshift.wire.errors import BadInputError


class EstimatorFunction(Protocol):
    """An estimator: [N] numbers, one per sample, or N arrays [T_i]; with a critic these and the values' targets."""

    def __call__(
        self, batch: AdvantageBatch, config: AlgorithmConfig, /
    ) -> NDArray[np.floating] | Sequence[NDArray[np.floating]] | Valued: ...


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator and what has to be known about it before a batch is there.

    Attributes:
        function: the estimator.
        compares_group: it compares the samples of one prompt, so that one sample per prompt teaches nothing.
        whole_batch: it needs the whole batch at once (a mean over all tokens); else whole groups are enough.
        needs_values: it needs a critic.
        needs_target: it needs log-probs under the policy that is trained, beside those of the one that sampled.
        needs_teacher: it needs a teacher.
    """

    function: EstimatorFunction
    compares_group: bool = False
    whole_batch: bool = False
    needs_values: bool = False
    needs_target: bool = False
    needs_teacher: bool = False


REGISTRY: dict[str, Estimator] = {
    "grpo": Estimator(estimators.grpo, compares_group=True),
    "dr_grpo": Estimator(estimators.dr_grpo, compares_group=True),
    "rloo": Estimator(estimators.rloo, compares_group=True),
    "reinforce_plus_plus": Estimator(estimators.reinforce_plus_plus, whole_batch=True),
    "reinforce_plus_plus_baseline": Estimator(
        estimators.reinforce_plus_plus_baseline, compares_group=True, whole_batch=True
    ),
    "gae": Estimator(estimators.gae_estimator, needs_values=True),
    "vtrace": Estimator(estimators.vtrace_estimator, needs_values=True, needs_target=True),
    "distillation": Estimator(estimators.distillation, needs_teacher=True),
}


def check_estimator(name: str, *, has_critic: bool = True, has_teacher: bool = True) -> None:
    """Checks the name of an estimator; runs no code of the user's.

    Args:
        has_critic: whether the job has one; False also refuses the estimators that need its values.
        has_teacher: the same of a teacher.

    Raises:
        BadInputError: neither registered nor a function that takes (batch, config), or it lacks its critic or teacher.
    """
    if name in REGISTRY:
        if REGISTRY[name].needs_teacher and not has_teacher:
            raise BadInputError(
                f"algorithm.estimator {name!r} needs the log-probs of a teacher, and the job has none",
                role="job",
                fix="Give scorers.teacher",
            )
        if REGISTRY[name].needs_values and not has_critic:
            raise BadInputError(
                f"algorithm.estimator {name!r} needs the values of a critic, and the job has none",
                role="job",
                fix="Choose an estimator without a critic (grpo, rloo, reinforce_plus_plus), or give scorers.critic",
            )
        return
    if not is_reference(name):
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise BadInputError(
            f"algorithm.estimator {name!r} is unknown",
            role="job",
            fix=f"{hint}There are {', '.join(REGISTRY)}, path.py:function or package.module.function",
        )
    check_custom(name)


def find_estimator(name: str) -> Estimator:
    """The estimator of this name; loads the user's code where the name refers to it.

    Custom estimators get the whole batch, since nothing says that they could do with less.

    Raises:
        BadInputError: as :func:`check_estimator`, or the code raises while it is loaded.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    check_estimator(name)
    return Estimator(load_custom(name), whole_batch=True)
