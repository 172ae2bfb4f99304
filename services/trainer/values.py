"""The critic's network and loss."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from nightshift.wire.errors import BadInputError
from services.trainer.config import RankConfig
from services.trainer.model_folder import load_model, refuse_missing
from services.trainer.policy import attention_mask, boundaries, use_packed_rows


class ValueModel(nn.Module):
    """A transformer with one number per token: V of the state in which that token is chosen.

    Called as :class:`services.trainer.policy.Policy` is; the second result is zeros in place of entropies.
    """

    def __init__(self, model: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.packed = False

    def forward(
        self,
        input_ids: Tensor,
        keep: Tensor,
        rows: Tensor,
        columns: Tensor,
        targets: Tensor,
        temperature: Tensor,
        position_ids: Tensor | None = None,
        visible: Tensor | None = None,
        starts: Tensor | None = None,
        longest: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Values of N tokens: at the position that predicts each, so that a value knows nothing of its token.

        Args:
            input_ids: [B, L] int64.
            keep: [K] columns of ``input_ids``.
            rows, columns, targets: [N] row, index into ``keep`` and id of each token.
            temperature: [N], not used.
            position_ids: [B, L]; None: 0, 1, 2, ...
            visible: [B, L, L] bool, true where a token sees another; None: causal.
            starts, longest: of :func:`services.trainer.policy.boundaries`, where B is 1 and the row packed.

        Returns:
            [N] float32 values, and [N] zeros.
        """
        context = torch.autocast(input_ids.device.type, dtype=torch.bfloat16) if self.autocast else nullcontext()
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask(self.model, visible),
            "position_ids": position_ids,
            **boundaries(starts, longest),
        }
        with context:
            values = self.model(**inputs).logits
        picked = values[rows, keep[columns], 0].float()
        return picked, torch.zeros_like(picked)


def load_value_model(config: RankConfig) -> tuple[ValueModel, bool]:
    """Reads the critic's folder: that of a value model, or of a language model, whose body is taken.

    Returns:
        The model, and whether its head is new (random until :func:`zero_head`).

    Raises:
        BadInputError: transformers knows no token classifier of this architecture, or cannot load the folder, or rows
            cannot be packed for it.
    """
    what, setting = "critic", "scorers.critic.model"
    fix = f"Name a folder whose architecture transformers has a token classifier for, in {setting}"
    model, missing = load_model(
        AutoModelForTokenClassification, config, what, role="critic", setting=setting, fix=fix, num_labels=1
    )
    model.config.use_cache = False
    head = {name for name, _ in head_of(model).named_parameters()}
    prefix = next(name for name, module in model.named_modules() if module is head_of(model))
    lost = [name for name in missing if name not in {f"{prefix}.{part}" for part in head}]
    refuse_missing(lost, config, what, role="critic", setting=setting)
    values = ValueModel(model, config.autocast)
    use_packed_rows(values, config, role="critic")
    return values, bool(missing)


def head_of(model: nn.Module) -> nn.Linear:
    """The layer that makes a value of a hidden state."""
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1]
    if not heads:
        raise BadInputError(
            f"{type(model).__name__} has no layer with one output", role="critic", fix="Choose another model"
        )
    return heads[-1]


def zero_head(model: ValueModel) -> None:
    """Makes all values 0: a critic that has learned nothing shifts no advantage."""
    with torch.no_grad():
        for parameter in head_of(model.model).parameters():
            parameter.zero_()
