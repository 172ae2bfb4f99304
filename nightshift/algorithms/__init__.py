"""Pure numpy: advantages, KL estimators, V-trace, importance weights, reward rules and the staleness bound."""

from nightshift.algorithms.advantages import AdvantageReport, compute_advantages, loss_kl_coef, needs_whole_batch
from nightshift.algorithms.batch import AdvantageBatch
from nightshift.algorithms.registry import REGISTRY, Estimator, check_estimator

__all__ = [
    "REGISTRY",
    "AdvantageBatch",
    "AdvantageReport",
    "Estimator",
    "check_estimator",
    "compute_advantages",
    "loss_kl_coef",
    "needs_whole_batch",
]
