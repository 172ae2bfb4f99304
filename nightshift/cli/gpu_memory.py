"""Memory that a job's roles take of each CUDA device, estimated, and whether it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nightshift.cli.estimate import ModelShape
from nightshift.cli.output import mib
from nightshift.config import JobSpec
from nightshift.config.scorers import REMOTE
from nightshift.gpu import Gpu, Placement, place
from nightshift.transfer import weight_transfer
from nightshift.wire.errors import BadInputError

_MIB = 1 << 20
_GIB = 1 << 30
#: Below it only small models find room.
LEAST_GPU_MEMORY = 16 * _GIB
_BYTES = {"float32": 4, "bfloat16": 2}
#: CUDA context and libraries of one process; vLLM adds workspaces and decode graphs. Measured on an H200.
_CONTEXT, _SERVER = 600 * _MIB, 3 * _GIB
#: Elements kept per token, layer and hidden unit for the backward pass, by whether the layers are compiled. Measured
#: with a 1.5B model in bfloat16, on an H200.
_KEPT_PER_LAYER = {True: 24, False: 40}
#: Tokens whose logits exist at once, and bytes for each of their elements (their gradient and a float32 copy).
_HEAD_TOKENS, _HEAD_BYTES = 4096, 10
#: What a server that sleeps gives back, and what the trainer holds within a step alone.
_TURNS = (("server's weights", "KV cache"), ("activations", "logits"))


def gpu_memory(spec: JobSpec, shape: ModelShape, placement: Placement) -> dict[int, dict[str, int]]:
    """CUDA device -> what lies there -> bytes."""
    parts: dict[int, dict[str, int]] = {}

    def add(gpu: int, name: str, size: int) -> None:
        parts.setdefault(gpu, {})
        parts[gpu][name] = parts[gpu].get(name, 0) + size

    rollout, trainer = spec.rollout, spec.trainer
    if rollout.own_servers:
        for gpu in placement.servers(rollout.servers):
            add(gpu, "server", _SERVER)
            add(gpu, "server's weights", shape.parameters * _BYTES[rollout.dtype])
            add(gpu, "KV cache", int(rollout.kv_cache_gib * _GIB))
        transfer = weight_transfer(spec, "cuda")
        if transfer == "ipc":  # one copy on each device that has servers
            for gpu in dict.fromkeys(placement.servers(rollout.servers)):
                context = 0 if gpu == placement.trainer[0] else _CONTEXT
                add(gpu, "published weights", context + shape.parameters * _BYTES[rollout.dtype])
        if transfer == "nccl":
            add(placement.trainer[0], "published weights", shape.parameters * _BYTES[rollout.dtype])
    size = _BYTES[trainer.dtype]
    sequence = spec.data.max_prompt_length + rollout.max_response_length
    tokens = max(sequence, trainer.max_tokens_per_micro_batch or trainer.micro_batch_size * sequence)
    kept = _KEPT_PER_LAYER[trainer.compile is not False and trainer.zero_stage < 3]
    layers = shape.layers + kept if trainer.gradient_checkpointing else shape.layers * kept
    ranks, stage = trainer.ranks, trainer.zero_stage
    for gpu in placement.trainer:
        states = shape.parameters * (8 if size == 4 else 12) // (ranks if stage >= 1 else 1)
        weights = shape.parameters * size // (ranks if stage == 3 else 1)
        gradients = shape.parameters * size + shape.parameters * 4 // (ranks if stage >= 2 else 1)
        add(gpu, "trainer", _CONTEXT + weights + states + gradients)
        add(gpu, "activations", tokens * shape.hidden * layers * (2 if trainer.autocast else size))
        add(gpu, "logits", min(tokens, _HEAD_TOKENS) * shape.vocab * _HEAD_BYTES)
    if spec.needs_reference and not (spec.scorers.reference.model or "").startswith(REMOTE):
        add(placement.trainer[0], "reference", _CONTEXT + shape.parameters * _BYTES[spec.scorers.reference.dtype])
    critic = spec.scorers.critic
    if critic is not None:
        # Weights, gradients and moments of its trainer, and the weights of its deployment; of the policy's size.
        size = shape.parameters * _BYTES[critic.dtype]
        add(placement.trainer[0], "critic", 2 * _CONTEXT + 3 * size + shape.parameters * 8)
    teacher = spec.scorers.teacher
    if spec.needs_teacher and teacher is not None and not teacher.model.startswith(REMOTE):
        add(placement.trainer[0], "teacher", _CONTEXT + shape.parameters * _BYTES[teacher.dtype])
    return parts


def at_once(parts: Mapping[str, int], sleep_mode: bool) -> int:
    """Bytes of a device's parts that lie there at one time: not all, where server and trainer take turns."""
    turns = [sum(parts.get(name, 0) for name in names) for names in _TURNS]
    return sum(parts.values()) - (min(turns) if sleep_mode else 0)


def check_gpu_memory(spec: JobSpec, shape: ModelShape, gpus: Sequence[Gpu]) -> None:
    """Checks that the roles fit into the devices that they are given.

    Raises:
        BadInputError: they do not; says what needs how much.
    """
    placement, rollout = place(spec.resources, spec.trainer.ranks, len(gpus)), spec.rollout
    for index, parts in gpu_memory(spec, shape, placement).items():
        need, gpu = at_once(parts, rollout.sleep_mode), gpus[index]
        if need > gpu.memory:
            turns = ", the server asleep while the trainer works" if rollout.sleep_mode else ""
            listed = ", ".join(f"{name} {mib(size)}" for name, size in parts.items())
            raise BadInputError(
                f"CUDA device {index} ({gpu.name}) has {mib(gpu.memory)}, the job needs about {mib(need)} of it"
                f"{turns}: {listed}",
                role="job",
                fix=_fix(parts, need - gpu.memory)
                + (_IN_TURN if rollout.own_servers and at_once(parts, sleep_mode=True) <= gpu.memory else ""),
            )


_IN_TURN = (
    "; or let server and trainer take turns, for which there is room: rollout.sleep_mode true, with "
    "pipeline.max_staleness 0"
)


def _fix(parts: dict[str, int], excess: int) -> str:
    """What to lower first: the largest part that can be lowered by itself."""
    fixes = {
        "KV cache": "Lower rollout.kv_cache_gib",
        "activations": "Lower trainer.max_tokens_per_micro_batch or trainer.micro_batch_size, or set "
        "trainer.gradient_checkpointing",
    }
    able = [name for name in sorted(fixes, key=lambda name: -parts.get(name, 0)) if parts.get(name, 0) > excess]
    return fixes[able[0]] if able else "Use a smaller model, more devices, or trainer.zero_stage 3 over more ranks"
