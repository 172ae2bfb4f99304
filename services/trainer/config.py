"""What one rank needs to know of a job, as plain values that cross a process boundary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from nightshift.config import JobSpec
from nightshift.gpu import Placement
from nightshift.transfer import weight_backend, weight_transfer
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
    max_tokens: int | None = None  # padded tokens per forward and backward pass, in place of micro_batch_size
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    share_prompts: bool = True  # samples of one micro-batch with the same prompt compute it once
    # Samples of a micro-batch lie end to end in one row, and prompts are not shared. None: where the model allows it.
    padding_free: bool | None = False
    seed: int = 0
    threads: int = 1
    device: str = "cpu"  # "cpu" or "cuda"
    rollout_dtype: str = "float32"  # precision in which weights are published
    weight_backend: str = "safetensors"  # how they are published: "safetensors", "ipc" or "nccl"
    weight_host: str = "127.0.0.1"  # under which servers reach rank 0, with "nccl"
    deterministic: bool = True  # algorithms that give the same bits each time, where torch has them
    compile: bool = False  # fuse the layers' small operations (torch.compile, layer by layer)
    gpus: tuple[int, ...] = ()  # CUDA devices of the ranks, by rank; empty: what Ray gives
    role: str = "trainer"  # "trainer" (the policy) or "critic"
    takes_turns: bool = False  # with servers that sleep: memory that no tensor holds is given back at a publication
    rollout_gpus: tuple[int, ...] = ()  # CUDA devices of the servers, to which "ipc" publishes; empty: rank 0's

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

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled: not where their parameters come and go (ZeRO stage 3)."""
        return self.compile and self.zero_stage < 3

    def seen_gpus(self, rank: int) -> list[int]:
        """CUDA devices that a rank sees, in the order in which it counts them: its own, and to rank 0 the servers'."""
        return list(dict.fromkeys([self.gpus[rank], *(self.rollout_gpus if rank == 0 else ())]))

    def publishes_to(self) -> list[int]:
        """Devices that "ipc" publishes to, as rank 0 counts them."""
        if not self.gpus or not self.rollout_gpus:
            return [0]
        seen = self.seen_gpus(0)
        return [seen.index(gpu) for gpu in self.rollout_gpus]

    @classmethod
    def for_critic(cls, spec: JobSpec, device: str, gpus: Placement | None = None) -> Self:
        """The settings of a rank that trains the critic; its weights are published as files.

        Raises:
            BadInputError: the job has no critic.
        """
        critic = spec.scorers.critic
        if critic is None:
            raise BadInputError("the job has no critic", role="critic", fix="Give scorers.critic")
        own = cls.from_spec(spec, device, gpus)
        return replace(
            own,
            role="critic",
            model_path=critic.model or spec.model.path,
            dtype=critic.dtype,
            autocast=own.autocast and critic.dtype == "float32",
            zero_stage=critic.zero_stage,
            micro_batch_size=critic.micro_batch_size,
            weight_decay=critic.weight_decay,
            max_grad_norm=critic.max_grad_norm,
            threads=critic.threads,
            rollout_dtype=critic.dtype,
            weight_backend="safetensors",
            compile=False,
            gpus=own.gpus[: critic.ranks],
            rollout_gpus=(),
        )

    @classmethod
    def from_spec(cls, spec: JobSpec, device: str, gpus: Placement | None = None) -> Self:
        """The rank settings of a resolved job (``model.path`` is a local folder).

        Args:
            device: "cpu" or "cuda".
            gpus: which CUDA device each role has; None: the first one for all.
        """
        trainer, cuda = spec.trainer, device == "cuda"
        # One kernel attends there, whose backward pass sums in no fixed order.
        packs = cuda and not spec.pipeline.deterministic
        backend = weight_backend(weight_transfer(spec, "cuda" if cuda else "cpu"))
        targets = dict.fromkeys(gpus.servers(spec.rollout.servers)) if gpus and backend == "ipc" else ()
        return cls(
            model_path=spec.model.path,
            tokenizer_path=spec.model.tokenizer,
            dtype=trainer.dtype,
            autocast=trainer.autocast is not None,
            attn_implementation=spec.model.attn_implementation,
            zero_stage=trainer.zero_stage,
            micro_batch_size=trainer.micro_batch_size,
            max_tokens=trainer.max_tokens_per_micro_batch,
            weight_decay=trainer.weight_decay,
            beta1=trainer.beta1,
            beta2=trainer.beta2,
            adam_epsilon=trainer.adam_epsilon,
            max_grad_norm=trainer.max_grad_norm,
            gradient_checkpointing=trainer.gradient_checkpointing,
            # Rows that several responses share need a mask, with which a GPU's flash attention cannot be used.
            share_prompts=trainer.share_prompts and not cuda,
            padding_free=False if trainer.padding_free is None and not packs else trainer.padding_free,
            seed=trainer.seed,
            threads=trainer.threads,
            device=device,
            rollout_dtype=spec.rollout.dtype,
            weight_backend=backend,
            weight_host=spec.resources.weight_host,
            deterministic=spec.pipeline.deterministic or not cuda,
            compile=cuda if trainer.compile is None else trainer.compile,
            gpus=gpus.trainer if gpus and cuda else (),
            takes_turns=spec.rollout.sleep_mode and cuda,
            rollout_gpus=tuple(targets),
        )
