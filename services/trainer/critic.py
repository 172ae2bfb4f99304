"""A rank that trains the critic: as a rank of the policy, with values in place of log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nightshift.wire.errors import BadInputError
from nightshift.wire.experience import LossSpec, Sample
from services.trainer.aggregate import token_weights, weighted_sum
from services.trainer.checks import VALUE_LOSS
from services.trainer.losses import value_loss
from services.trainer.policy import can_share
from services.trainer.rank import TrainerRank
from services.trainer.values import load_value_model, zero_head


class CriticRank(TrainerRank):
    """One rank of the critic. ``log_probs`` answers with values."""

    def _load(self) -> None:
        self.policy, new_head = load_value_model(self.config)
        # Asked before the head is zeroed: values that are all 0 would agree whatever the attention does.
        self._share = not self.policy.packed and self.config.share_prompts and can_share(self.policy)
        if new_head:
            zero_head(self.policy)

    def _micro_step(self, samples: Sequence[Sample], spec: LossSpec, loss_divisor: float | None) -> tuple[int, Tensor]:
        if spec.policy_loss != VALUE_LOSS:
            raise BadInputError(f"the critic has no loss {spec.policy_loss!r}", role="critic", fix="Send it 'value'")
        batch = self._batch([(sample.prompt_ids, sample.response_ids) for sample in samples])
        masks = [sample.loss_mask for sample in samples]
        weights = self._upload(token_weights(masks, spec.aggregation))
        mask = self._upload(np.concatenate(masks)) > 0
        old = self._joined(sample.values for sample in samples)
        returns = self._joined(sample.returns for sample in samples)
        values, _ = self._forward(batch, 1.0)
        outputs = value_loss(values, old, returns, spec.options.get("value_clip"))
        loss = weighted_sum(outputs.losses, mask, weights)
        self._see(
            old_values=old, returns=returns, mask=mask, values=values, loss=loss,
            parameters=next(self.policy.parameters()),
        )  # fmt: skip
        self._backward(loss, loss_divisor)
        with torch.no_grad():
            clipped = (outputs.clipped & mask).sum().double()
            total, none = loss.detach().double(), torch.zeros((), dtype=torch.float64, device=loss.device)
            sums = {"loss": total, "policy": total, "clipped": clipped}
            return batch.input_ids.size, self._row(sums, none)
