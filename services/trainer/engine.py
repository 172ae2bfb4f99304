"""DeepSpeed underneath a rank: process group, engine, and the gradient arithmetic that it leaves to the caller.

A batch comes in parts and micro-batches of unknown number, and its totals may be known only at the end. DeepSpeed's
"unmanaged" accumulation adds up every backward pass and steps when told. The division by the totals is then its loss
scale: scale 1 while sums are accumulated, scale = total when stepping, so that the norm is divided before the clip.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.trainer.checks import NonFiniteGradientError
from services.trainer.config import RankConfig

#: Elements that are reduced or gathered in one collective.
_BUCKET_ELEMENTS = 25_000_000


def init_process_group(rank: int, world: int, init_method: str | None, device: str, timeout_s: float = 600.0) -> None:
    """Joins the ranks (gloo on a CPU, NCCL on CUDA). One rank alone opens no port.

    Args:
        rank: number of this rank.
        world: number of ranks.
        init_method: ``tcp://host:port`` or ``file:///path`` where ``world`` > 1.
        device: "cpu" or "cuda".
        timeout_s: deadline of the rendezvous and of each collective.
    """
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world)):
        os.environ.setdefault(name, str(value))
    if dist.is_initialized():
        return
    from datetime import timedelta

    common: dict[str, Any] = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=timeout_s)}
    backend = "nccl" if device == "cuda" else "gloo"
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), **common)
    else:
        dist.init_process_group(backend, init_method=init_method, **common)


class Engine:
    """A DeepSpeed ZeRO engine that sums gradients and divides them once.

    Args:
        module: returns what the loss is made of; its parameters are trained.
        config: precision, stage and optimiser.
        device: where the module runs.
    """

    def __init__(self, module: nn.Module, config: RankConfig, device: torch.device) -> None:
        deepspeed = _import_deepspeed(config.device)
        self._config = config
        self._device = device
        self.world = dist.get_world_size()
        optimizer = torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad],
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=_deepspeed_config(config), dist_init_required=False
        )
        self._zero: Any = self.engine.optimizer if config.zero_stage else None

    def __call__(self, **inputs: Any) -> Any:
        """Forward pass."""
        return self.engine(**inputs)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a scalar to what is accumulated, as a sum over micro-batches and ranks."""
        # DeepSpeed averages over the ranks; sums of partial sums are wanted.
        if self._zero is not None:
            self._zero.override_loss_scale(1.0)
        self.engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self, divisor: float, learning_rate: float) -> float:
        """Divides the accumulated gradient, clips it, and makes one optimiser step.

        Returns:
            The gradient's norm after the division, before the clip.

        Raises:
            NonFiniteGradientError: nothing was changed.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._zero is None:
            return self._step_unpartitioned(divisor)
        self._zero.override_loss_scale(divisor)
        self.engine.step()
        norm = float(self._zero._global_grad_norm)
        self._clear()
        if self._zero.overflow or not math.isfinite(norm) or norm < 0:
            raise _non_finite()
        return norm

    def discard(self) -> None:
        """Forgets what is accumulated."""
        self._clear()

    def _step_unpartitioned(self, divisor: float) -> float:
        """Stage 0: DeepSpeed neither divides nor reports a norm there, so that both happen here."""
        parameters = [p for p in self.engine.module.parameters() if p.grad is not None]
        if self.world > 1:
            self.engine.buffered_allreduce_fallback(grads=[p.grad for p in parameters])
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters])) / divisor
        if not math.isfinite(norm):
            self._clear()
            raise _non_finite()
        scale = divisor * max(1.0, (norm + 1e-6) / self._config.max_grad_norm)
        for parameter in parameters:
            parameter.grad.mul_(1.0 / scale)
        self.engine.optimizer.step()
        self._clear()
        return norm

    def _clear(self) -> None:
        zero = self._zero
        if zero is None:
            self.engine.zero_grad()
            return
        zero.zero_grad(set_to_none=True)
        # Stages 1 and 2 keep their sums outside the parameters' gradients, where zero_grad does not reach.
        for name in ("averaged_gradients", "all_grad_tensors"):
            held = getattr(zero, name, {})
            for key in held:
                held[key] = None
        release = getattr(zero, "_release_preflattened_grad_buffers", None)
        if release is not None:
            release()


def _non_finite() -> NonFiniteGradientError:
    return NonFiniteGradientError(
        "the gradient is not finite, so no optimiser step was made",
        role="trainer",
        fix="Lower trainer.learning_rate, or look for extreme advantages in the rollouts",
    )


def _import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device == "cpu":
        # A shared-memory all-reduce for inference that training never calls. Declaring it unavailable spares a C++
        # compiler at start-up and leaves no file in /dev/shm after a crash.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", verbose=False)
    return deepspeed


def _deepspeed_config(config: RankConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_grad_norm if config.zero_stage else 0.0,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            # The buffer of a contiguous copy is allocated anew in every backward pass, at the bucket's full size: 2 GB
            # by default, whatever the model. One rank has nothing to send, hence no use for it.
            "contiguous_gradients": dist.get_world_size() > 1,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
        },
    }
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        if config.zero_stage in (2, 3):
            # Sums of many micro-batches lose their small terms in bfloat16.
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
