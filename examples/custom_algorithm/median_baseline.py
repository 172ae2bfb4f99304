"""An advantage estimator of one's own: the score less the median of its group, over the mean distance from it."""

import numpy as np


def median_baseline(batch, config):
    """One number per sample, which stands for all its tokens.

    Args:
        batch: nightshift.algorithms.AdvantageBatch.
        config: section ``algorithm`` of the job.
    """
    rewards, advantages = batch.sequence_rewards(), np.zeros(len(batch))
    for members in batch.groups():
        scored = members[batch.scored[members]]
        if len(scored):
            distance = rewards[scored] - np.median(rewards[scored])
            advantages[scored] = distance / (np.abs(distance).mean() + config.epsilon)
    return advantages
