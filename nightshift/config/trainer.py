"""Section ``trainer``: optimiser, parallelism and the length of the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nightshift.config.base import Section
from nightshift.config.model import DType


class TrainerConfig(Section):
    """DeepSpeed ZeRO ranks."""

    total_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps of the run; null: what ``total_epochs`` gives."""

    total_epochs: int = Field(default=1, ge=1)
    """Passes over the prompts where ``total_steps`` is null."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW, after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: level, or falling to 0 at the last step, in a line or a cosine."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""

    micro_batch_size: int = Field(default=4, ge=1)
    """Samples per forward and backward pass of one rank."""

    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens, with padding, per forward and backward pass of one rank, in place of ``micro_batch_size``; samples of
    like length are put together. A sample that is longer has a pass of its own. Null: ``micro_batch_size`` counts."""

    padding_free: bool | None = None
    """Lays the samples of a micro-batch end to end in one row, where each sees itself alone, in place of padded rows;
    prompts are then not shared. Policy and critic need full attention in every layer, under
    ``model.attn_implementation`` sdpa. In bfloat16 on CUDA attention is one kernel, elsewhere it goes sample by
    sample. Null: where it is one kernel, the model allows it and ``pipeline.deterministic`` is off."""

    compile: bool | None = None
    """Fuse the small operations of each layer (torch.compile): up to a minute at the start. Null: on CUDA only."""

    dtype: DType = "float32"
    """Precision of the parameters."""

    autocast: Literal["bfloat16"] | None = None
    """Precision of the matrix products where the parameters are float32."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What ZeRO shards over the ranks: 0 nothing, 1 optimiser state, 2 also gradients, 3 also parameters."""
    ranks: int = Field(default=1, ge=1)
    """Processes over which a batch is split."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""

    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about 1.4 times the time."""

    share_prompts: bool = True
    """Samples of one micro-batch with the same prompt compute it once; the metric ``positions`` counts what was."""

    seed: int = Field(default=0, ge=0)
    """Seed of the run: prompt order, sampling, initialisation."""

    test_freq: int = Field(default=5, ge=0)
    """Steps between evaluations; 0: only before and after."""

    save_freq: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: none by steps, only by ``save_minutes``, at the end and on an interruption."""

    save_minutes: float | None = Field(default=10.0, gt=0)
    """Minutes after a checkpoint at which the next step makes another one, without an export, only to go on from after
    a crash: it goes when the next one is there. They take a twentieth of the time at most. Null: none by the clock."""

    update_timeout_s: float = Field(default=1800.0, gt=0)
    """Deadline of one update."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest time until all ranks are ready."""
