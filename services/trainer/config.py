"""What one rank needs to know of a job, as plain values that cross a process boundary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from nightshift.config import JobSpec
from nightshift.wire.errors import BadInputError


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Model, precision and optimiser of a rank.

    Raises:
        BadInputError: settings that do not go together.
    """

    model_path: str
    tokenizer_path: str | None = None  # folder of the tokenizer where it is not in ``model_path``
    dtype: str = "float32"  # of the parameters
    autocast: bool = False  # bfloat16 matrix products on float32 parameters
    attn_implementation: str = "sdpa"
    zero_stage: int = 2
    micro_batch_size: int = 4  # samples per forward and backward pass
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    share_prompts: bool = True  # samples of one micro-batch with the same prompt compute it once
    seed: int = 0
    threads: int = 1
    device: str = "cpu"  # "cpu" or "cuda"
    rollout_dtype: str = "float32"  # precision in which weights are published

    def __post_init__(self) -> None:
        if self.zero_stage == 0 and self.dtype == "bfloat16":
            # DeepSpeed's stage 0 keeps its fp32 copy by another optimiser, whose losses drift from stages 1 to 3.
            raise BadInputError(
                "trainer.zero_stage 0 with trainer.dtype bfloat16 is not supported",
                role="trainer",
                fix="Set trainer.zero_stage to 1, 2 or 3, or trainer.dtype to float32",
            )
        if self.autocast and self.dtype != "float32":
            raise BadInputError("trainer.autocast needs trainer.dtype float32", role="trainer")

    @classmethod
    def from_spec(cls, spec: JobSpec, device: str) -> Self:
        """The rank settings of a resolved job (``model.path`` is a local folder)."""
        trainer = spec.trainer
        return cls(
            model_path=spec.model.path,
            tokenizer_path=spec.model.tokenizer,
            dtype=trainer.dtype,
            autocast=trainer.autocast is not None,
            attn_implementation=spec.model.attn_implementation,
            zero_stage=trainer.zero_stage,
            micro_batch_size=trainer.micro_batch_size,
            weight_decay=trainer.weight_decay,
            beta1=trainer.beta1,
            beta2=trainer.beta2,
            adam_epsilon=trainer.adam_epsilon,
            max_grad_norm=trainer.max_grad_norm,
            gradient_checkpointing=trainer.gradient_checkpointing,
            share_prompts=trainer.share_prompts,
            seed=trainer.seed,
            threads=trainer.threads,
            device=device,
            rollout_dtype=spec.rollout.dtype,
        )
