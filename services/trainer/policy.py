"""The policy network of a rank: log-probs and entropies of given tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nightshift.wire.errors import BadInputError
from services.trainer.batching import Batch, Pair, pack, pad
from services.trainer.config import RankConfig
from services.trainer.head import head_log_probs
from services.trainer.model_folder import load_model, refuse_missing

#: Logits of one pass above which they are made in chunks: 512 MiB in float32.
WHOLE_LOGITS = 1 << 27
#: Settings of models whose head does more than a matrix product.
_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class Policy(nn.Module):
    """A causal language model that returns log-probs instead of logits.

    The autocast context lies inside the module: DeepSpeed's own would also reduce gradients in bfloat16.

    Args:
        model: the causal language model.
        autocast: bfloat16 matrix products on float32 parameters.
        partitioned: whether the parameters are spread over ranks (ZeRO stage 3); the head is then only what the model
            makes of it.
        compiled: fuse what is done to the logits.
    """

    def __init__(self, model: nn.Module, autocast: bool, *, partitioned: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.compiled = compiled
        self.packed = False  # whether rows are packed: see use_packed_rows
        self._plain = not partitioned and _has_plain_head(model)

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
        """Log-probs and entropies of N tokens in B rows.

        Args:
            input_ids: [B, L] int64.
            keep: [K] columns whose logits are computed.
            rows, columns, targets: [N] row, index into ``keep`` and id of each token.
            temperature: [N] float32 that divides the logits, as in the sampler.
            position_ids: [B, L]; None: 0, 1, 2, ...
            visible: [B, L, L] bool, true where a token sees another; None: causal.
            starts, longest: of :func:`boundaries`, where B is 1 and the row packed.

        Returns:
            Two [N] float32 tensors: log pi(token), and the entropy of the distribution at its position in nats.
        """
        context = torch.autocast(input_ids.device.type, dtype=torch.bfloat16) if self.autocast else nullcontext()
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask(self.model, visible),
            "position_ids": position_ids,
            "use_cache": False,
            **boundaries(starts, longest),
        }
        if self._plain and len(targets) * self.model.config.vocab_size > WHOLE_LOGITS:
            with context:
                states = self.model.get_decoder()(**inputs).last_hidden_state
            weight = self.model.get_output_embeddings().weight
            hidden = states[rows, keep[columns]].to(torch.bfloat16 if self.autocast else weight.dtype)
            return head_log_probs(hidden, weight, targets, temperature, compiled=self.compiled)
        with context:
            logits = self.model(**inputs, logits_to_keep=keep).logits
        picked = logits[rows, columns].float() / temperature[:, None]
        log_norm = torch.logsumexp(picked, dim=-1)
        logprobs = picked.gather(1, targets[:, None]).squeeze(1) - log_norm
        entropy = log_norm - (torch.softmax(picked, dim=-1) * picked).sum(-1)
        return logprobs, entropy


def attention_mask(model: nn.Module, visible: Tensor | None) -> Tensor | None:
    """The 4-dimensional mask [B, 1, L, L] that a model's attention takes: added to scores, or boolean; None: causal.

    Args:
        visible: [B, L, L] bool, true where a token sees another.
    """
    if visible is None:
        return None
    if model.config._attn_implementation != "eager":
        return visible[:, None]
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[:, None]


def boundaries(starts: Tensor | None, longest: int | None) -> dict[str, Any]:
    """Arguments of a model's forward pass that say where the sequences of a packed row are; none for padded rows.

    Args:
        starts: [S + 1] int32: the column at which each sequence begins, and the length of the row.
        longest: tokens of the longest sequence.
    """
    return {} if starts is None else {"cu_seq_lens_q": starts, "max_length_q": longest}


def can_share(policy: Policy) -> bool:
    """Whether responses may share the row of their prompt: whether the model's attention follows a mask that is given.

    Tried on a few tokens, since a model may ignore the mask, or hold recurrent state.
    """
    if policy.model.config._attn_implementation not in ("eager", "sdpa") or not _full_attention(policy):
        return False
    pairs = _trial(policy)
    return _agree(policy, _values(policy, pad(pairs, share=True)), _values(policy, pad(pairs)))


def use_packed_rows(policy: Policy, config: RankConfig, *, role: str) -> None:
    """Gives the model the attention of packed rows where the configuration wants it and it answers as before.

    Tried on a few tokens, since a model may not use the attention that it is given, or hold recurrent state.
    ``policy.packed`` says how it came out.

    Raises:
        BadInputError: it does not answer as before, and packed rows were asked for.
    """
    if config.padding_free is False:
        return
    # Only here, since it loads torch's compiler, which takes seconds.
    from services.trainer.packed_attention import PACKED

    model: Any = policy.model
    half = policy.autocast or next(policy.parameters()).dtype != torch.float32
    wanted = half or bool(config.padding_free)  # in float32 attention goes sample by sample
    fits = wanted and model.config._attn_implementation == "sdpa" and _full_attention(policy)
    if fits:
        pairs = _trial(policy)
        before = torch.cat([_values(policy, pad([pair])) for pair in pairs])
        model.set_attn_implementation(PACKED)
        try:
            fits = model.config._attn_implementation == PACKED and _agree(policy, _values(policy, pack(pairs)), before)
        except TypeError:  # it does not take the boundaries, or does not hand them on
            fits = False
        if not fits:
            model.set_attn_implementation("sdpa")
    policy.packed = fits
    if not fits and config.padding_free:
        raise BadInputError(
            f"trainer.padding_free does not fit {type(model).__name__} from {config.model_path} with attention "
            f"{config.attn_implementation}: its layers do not keep the sequences of one row apart",
            role=role,
            fix="Set trainer.padding_free to false, or model.attn_implementation to sdpa where it is another",
        )


def _full_attention(policy: Policy) -> bool:
    """Whether every layer sees all that came before."""
    config = policy.model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return not windowed and kinds == {"full_attention"}


def _trial(policy: Policy) -> list[Pair]:
    """Two responses to one prompt."""
    size = int(policy.model.config.vocab_size)
    prompt, one, two = (np.arange(first, first + 4, dtype=np.int32) % size for first in (1, 3, 7))
    return [(prompt, one), (prompt, two)]


def _values(policy: Policy, batch: Batch) -> Tensor:
    with torch.no_grad():
        inputs = to_device(batch, next(policy.parameters()).device)
        return policy(temperature=torch.ones(len(batch.targets)), **inputs)[0].float()


def _agree(policy: Policy, one: Tensor, other: Tensor) -> bool:
    tolerance = 1e-3 if next(policy.parameters()).dtype == torch.float32 and not policy.autocast else 0.5
    return bool(torch.allclose(one, other, atol=tolerance, rtol=0.0))


def load_policy(config: RankConfig) -> Policy:
    """Reads the model from its folder in the parameters' precision.

    Raises:
        BadInputError: the folder holds no whole causal language model that transformers can load, or rows cannot be
            packed for it.
    """
    what, setting = "model", "model.path"
    model, missing = load_model(
        AutoModelForCausalLM, config, what, role="trainer", setting=setting, fix=f"Check {setting}"
    )
    refuse_missing(missing, config, what, role="trainer", setting=setting)
    policy = Policy(model, config.autocast, partitioned=config.zero_stage == 3, compiled=config.compiles)
    use_packed_rows(policy, config, role="trainer")
    if config.compiles:
        _compile_layers(model)
    return policy


def _has_plain_head(model: nn.Module) -> bool:
    """Whether logits are the last hidden states times one matrix."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    config: Any = getattr(model, "config", None)
    return (
        isinstance(head, nn.Linear)
        and head.bias is None
        and hasattr(model, "get_decoder")
        and not any(getattr(config, name, None) for name in _HEAD_SETTINGS)
    )


def _compile_layers(model: nn.Module) -> None:
    """Compiles each decoder layer on its own: all share one graph, so that it is made once and not per layer."""
    layers = getattr(model.get_decoder(), "layers", None)
    for layer in layers if isinstance(layers, nn.ModuleList) else ():
        layer.compile(dynamic=True)


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """What a batch holds, arrays as tensors, by the names of :meth:`Policy.forward`."""
    names = ("input_ids", "keep", "rows", "columns", "targets", "position_ids", "visible", "starts")
    arrays = {name: getattr(batch, name) for name in names}
    longest = {} if batch.starts is None else {"longest": int(np.diff(batch.starts).max())}
    return {name: upload(array, device) for name, array in arrays.items() if array is not None} | longest


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on a device, without waiting for what the device is busy with."""
    # Arrays from the wire are read-only, which torch warns about.
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
