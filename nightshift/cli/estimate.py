"""Memory of each role, estimated from the model's description and the job: no weights are read, no torch is needed.

The fixed parts (interpreter and libraries of a process) are measured resident sizes on Linux with the CPU builds; the
rest is counted: weights, gradients, optimiser states, KV cache, logits and activations.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightshift.config import JobSpec
from nightshift.config.scorers import REMOTE
from nightshift.wire.errors import BadInputError

MIB = 1 << 20
_BYTES = {"float32": 4, "bfloat16": 2}
#: Three processes of a vLLM server, each with torch and vLLM loaded, without weights and KV cache.
_VLLM_BASE = 1770 * MIB
#: A process with torch, transformers and DeepSpeed.
_TORCH_BASE = 750 * MIB
_RAY_BASE = 450 * MIB
_REWARD_REPLICA, _REWARD_WORKER = 200 * MIB, 60 * MIB
_ORCHESTRATOR_BASE, _AGENT_BASE, _CLI_BASE = 200 * MIB, 250 * MIB, 150 * MIB
#: Tensors of a layer's hidden size that the backward pass keeps, per token and layer; attention without scores.
_KEPT_PER_LAYER = 34
_HEADER_LIMIT = 100 * MIB


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its memory."""

    parameters: int
    hidden: int
    layers: int
    vocab: int
    positions: int | None
    kv_width: int  # key or value width of one layer: heads x head size
    dtype: str  # of the stored weights


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one role in bytes, with what it is made of."""

    role: str
    bytes: int
    made_of: dict[str, int]


def read_shape(folder: Path) -> ModelShape:
    """Reads ``config.json`` and the headers of ``*.safetensors``.

    Raises:
        BadInputError: a file is absent or malformed; the message names it.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        heads = int(text["num_attention_heads"])
        head = int(text.get("head_dim") or text["hidden_size"] // heads)
        parameters, dtype = _count(folder)
        return ModelShape(
            parameters=parameters,
            hidden=int(text["hidden_size"]),
            layers=int(text["num_hidden_layers"]),
            vocab=int(text["vocab_size"]),
            positions=text.get("max_position_embeddings"),
            kv_width=int(text.get("num_key_value_heads") or heads) * head,
            dtype=dtype,
        )
    except OSError as error:
        raise BadInputError(f"cannot read {str(path)!r}: {error.strerror}", role="model") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{str(path)!r} does not describe a language model: {error!r}", role="model") from error


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets.

    Raises:
        BadInputError: the file is not of that format.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _HEADER_LIMIT:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
            if not isinstance(header, dict):
                raise ValueError("the header is not a map")
    except (OSError, ValueError, struct.error) as error:
        raise BadInputError(f"{str(path)!r} is no safetensors file: {error}", role="model") from error
    header.pop("__metadata__", None)
    return header


def _count(folder: Path) -> tuple[int, str]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInputError(f"{str(folder)!r} holds no *.safetensors", role="model")
    total, names = 0, set()
    for file in files:
        for tensor in read_header(file).values():
            size = 1
            for length in tensor["shape"]:
                size *= int(length)
            total += size
            names.add(str(tensor["dtype"]))
    return total, "bfloat16" if names <= {"BF16", "F16"} else "float32"


def estimate(spec: JobSpec, shape: ModelShape) -> list[Part]:
    """Memory of every role that the job starts on this machine."""
    sequence = spec.data.max_prompt_length + spec.rollout.max_response_length
    if spec.rollout.max_model_len is not None:
        sequence = min(sequence, spec.rollout.max_model_len)
    parts: list[dict[str, int] | str] = []
    if spec.rollout.own_servers and not spec.is_preference:
        each = _rollout(spec, shape)
        parts += ["rollout", {name: size * spec.rollout.servers for name, size in each.items()}]
    parts += ["trainer", _trainer(spec, shape, sequence)]
    remote = (spec.scorers.reference.model or "").startswith(REMOTE)
    if spec.needs_reference and not remote:
        parts += ["reference", _reference(spec, shape, sequence)]
    teacher = spec.scorers.teacher
    if spec.needs_teacher and teacher is not None and not teacher.model.startswith(REMOTE):
        its = read_shape(Path(teacher.model)) if (Path(teacher.model) / "config.json").is_file() else shape
        logits = teacher.micro_batch_size * sequence * its.vocab * 4 * 2
        parts += [
            "teacher",
            {"processes": _TORCH_BASE, "weights": its.parameters * _BYTES[teacher.dtype], "logits": logits},
        ]
    if spec.scorers.critic is not None:
        parts += ["critic", _critic(spec, shape, sequence)]
    python = [reward for reward in spec.rewards if reward.type == "python"]
    if python:
        workers = sum(reward.workers for reward in python)
        parts += ["reward", {"replicas": len(python) * _REWARD_REPLICA, "workers": workers * _REWARD_WORKER}]
    parts += ["ray", {"processes": _RAY_BASE, "object store": spec.resources.ray_object_store_mib * MIB}]
    parts += ["weight store", {"two copies": 2 * shape.parameters * _BYTES[spec.rollout.dtype]}]
    own = {"runner": _ORCHESTRATOR_BASE, "agent": _AGENT_BASE, "command": _CLI_BASE}
    parts += ["orchestrator", {**own, "buffer (at most)": min(spec.pipeline.buffer_mib * MIB, _buffer(spec, sequence))}]
    return [
        Part(str(role), sum(made.values()), made)
        for role, made in zip(parts[::2], parts[1::2], strict=True)
        if isinstance(made, dict)
    ]


def kv_tokens(spec: JobSpec, shape: ModelShape) -> int:
    """Tokens that the KV cache holds."""
    per_token = 2 * shape.layers * shape.kv_width * _BYTES[spec.rollout.dtype]
    return int(spec.rollout.kv_cache_gib * 1024 * MIB) // per_token


def _rollout(spec: JobSpec, shape: ModelShape) -> dict[str, int]:
    return {
        "processes": _VLLM_BASE,
        "weights": shape.parameters * _BYTES[spec.rollout.dtype],
        "KV cache": int(spec.rollout.kv_cache_gib * 1024 * MIB),
        "logits": spec.rollout.max_num_seqs * shape.vocab * 4 * 2,
    }


def _trainer(spec: JobSpec, shape: ModelShape, sequence: int) -> dict[str, int]:
    trainer = spec.trainer
    ranks, stage, size = trainer.ranks, trainer.zero_stage, _BYTES[trainer.dtype]
    tokens = trainer.micro_batch_size * sequence * (2 if spec.is_preference else 1)  # of pairs, both
    # Adam's two moments in float32, and a float32 copy of parameters that are not float32 themselves.
    optimiser = shape.parameters * (8 if size == 4 else 12)
    compute = 2 if trainer.autocast else size
    kept = _KEPT_PER_LAYER * shape.layers if not trainer.gradient_checkpointing else shape.layers + _KEPT_PER_LAYER
    return {
        "processes": ranks * _TORCH_BASE + _AGENT_BASE,
        "weights": shape.parameters * size * (1 if stage == 3 else ranks),
        "gradients": shape.parameters * size * (1 if stage >= 2 else ranks),
        "optimiser": optimiser * (1 if stage >= 1 else ranks),
        "autocast copies": ranks * shape.parameters * 2 if trainer.autocast else 0,
        "activations": ranks * tokens * shape.hidden * kept * compute,
        "logits": ranks * tokens * shape.vocab * 4 * 3,
    }


def _critic(spec: JobSpec, shape: ModelShape, sequence: int) -> dict[str, int]:
    """The critic's trainer and its deployment; a critic without a folder of its own has the policy's body."""
    critic = spec.scorers.critic
    if critic is None:
        return {}
    if critic.model is not None and (Path(critic.model) / "config.json").is_file():
        shape = read_shape(Path(critic.model))
    size, ranks, stage = _BYTES[critic.dtype], critic.ranks, critic.zero_stage
    tokens = ranks * critic.micro_batch_size * sequence
    return {
        "processes": (ranks + 1) * _TORCH_BASE + _AGENT_BASE,
        "weights": shape.parameters * size * ((1 if stage == 3 else ranks) + 1),
        "gradients": shape.parameters * size * (1 if stage >= 2 else ranks),
        "optimiser": shape.parameters * (8 if size == 4 else 12) * (1 if stage >= 1 else ranks),
        "activations": tokens * shape.hidden * _KEPT_PER_LAYER * shape.layers * size,
        "published": 2 * shape.parameters * size,
    }


def _reference(spec: JobSpec, shape: ModelShape, sequence: int) -> dict[str, int]:
    reference = spec.scorers.reference
    return {
        "processes": _TORCH_BASE,
        "weights": shape.parameters * _BYTES[reference.dtype],
        "logits": reference.micro_batch_size * sequence * shape.vocab * 4 * 2,
    }


def _buffer(spec: JobSpec, sequence: int) -> int:
    """Experience of the batches that may be under way: ids, log-probs, reference, advantages and mask of each token."""
    ahead = spec.pipeline.max_staleness if spec.pipeline.max_staleness is not None else 4
    samples = spec.rollout.batch_size * spec.rollout.n * (ahead + 2)
    return samples * sequence * 20
