"""The command line and the environment of a vLLM server, as a pure function of the job."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightshift.config.job import JobSpec
from nightshift.gpu import Device, visible_names
from services.rollout.compat import installed_version, version_flags

_REPOSITORY = Path(__file__).resolve().parents[2]
_SITE = Path(__file__).resolve().parent / "site"
_GIB = 1 << 30
#: Settings of the caller's shell that would change what the server offers or how much memory it takes.
_DROPPED = (
    *("VLLM_API_KEY", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE", "OTEL_TRACES_SAMPLER"),
    *("NIGHTSHIFT_WEIGHT_STORE", "NIGHTSHIFT_WEIGHT_URL", "NIGHTSHIFT_WEIGHT_CACHE"),
)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to execute."""

    argv: list[str]
    env: dict[str, str]


def default_backend(device: Device) -> str:
    """Weight transfer of a server that shares a machine with its trainer."""
    return "ipc" if device == "cuda" else "safetensors"


def context_length(spec: JobSpec, max_positions: int | None) -> int:
    """Tokens that a sequence may have: prompt, response and one more, as far as the model goes.

    The one more is for scoring a full sequence: vLLM decodes at least one token.
    """
    if spec.rollout.max_model_len is not None:
        return spec.rollout.max_model_len
    wanted = spec.data.max_prompt_length + spec.rollout.max_response_length + 1
    return min(wanted, max_positions) if max_positions else wanted


def server_command(
    spec: JobSpec,
    *,
    port: int,
    token: str,
    store: Path | None,
    device: Device = "cpu",
    cores: Sequence[int] = (),
    gpu: int | None = None,
    weight_backend: str | None = None,
    weights_url: str | None = None,
    cache: Path | None = None,
    otlp: str | None = None,
    max_positions: int | None = None,
    base_env: Mapping[str, str] | None = None,
    vllm_version: tuple[int, int] | None = None,
    host: str = "127.0.0.1",
) -> ServerCommand:
    """Arguments and whole environment of ``vllm.entrypoints.openai.api_server`` for a job.

    Args:
        store: folder of the published weights; the server takes weight files from nowhere else. None: from no folder.
        cores: CPU cores that its compute threads are bound to (CPU only); empty: vLLM's own choice.
        host: address that it listens on.
        gpu: CUDA device of the server, as this process counts them; None: the first one.
        weight_backend: "safetensors", "ipc" or "nccl"; None: what suits the device.
        weights_url: weight server that it may fetch weight files from; None: from none.
        cache: its own folder for fetched files; None: one below the folder for temporary files.
        otlp: ``http://host:port`` to which its spans go; None: none are made.
        max_positions: longest context of the model; None: unknown.
        base_env: environment to start from.
        vllm_version: major and minor version of vLLM; None: the installed one.
    """
    rollout = spec.rollout
    backend = weight_backend or default_backend(device)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", spec.model.path, "--served-model-name", "policy"]
    if spec.model.tokenizer:
        argv += ["--tokenizer", spec.model.tokenizer]
    argv += ["--host", host, "--port", str(port)]
    argv += ["--dtype", rollout.dtype, "--max-model-len", str(context_length(spec, max_positions))]
    argv += ["--max-num-seqs", str(rollout.max_num_seqs)]
    argv += ["--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * _GIB))]
    argv += ["--seed", str(spec.trainer.seed)]
    # Log-probs of the distribution that is sampled from, not of temperature 1: what the ratio needs.
    argv += ["--logprobs-mode", "processed_logprobs"]
    # A generation_config.json may carry sampling filters; its end-of-sequence ids apply all the same.
    argv += ["--generation-config", "vllm"]
    argv += [*version_flags(installed_version() if vllm_version is None else vllm_version)]
    argv += ["--enable-request-id-headers"]
    argv += ["--weight-transfer-config", json.dumps({"backend": backend})]
    # The last one named stands outside: the guard sees every request first.
    argv += ["--middleware", "services.rollout.route.Route", "--middleware", "services.rollout.guard.Guard"]
    argv += ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if rollout.sleep_mode:
        argv += ["--enable-sleep-mode"]  # its weights and KV cache lie where they can be given back; CUDA alone
    argv += _cpu_flags() if device == "cpu" else _cuda_flags(rollout.dtype)
    if otlp:
        argv += ["--otlp-traces-endpoint", otlp]
    argv += rollout.extra_args  # last, so that they win

    env = {key: value for key, value in (base_env or {}).items() if key not in _DROPPED}
    paths = [str(_SITE), str(_REPOSITORY), *filter(None, [env.get("PYTHONPATH")])]
    env |= {
        "PYTHONPATH": ":".join(paths),
        "PYTHONUNBUFFERED": "1",
        "NIGHTSHIFT_ROLLOUT_TOKEN": token,
        "VLLM_SERVER_DEV_MODE": "1",  # or the pause and weight-transfer routes do not exist
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    sources = {"NIGHTSHIFT_WEIGHT_STORE": store, "NIGHTSHIFT_WEIGHT_URL": weights_url, "NIGHTSHIFT_WEIGHT_CACHE": cache}
    env |= {name: str(value) for name, value in sources.items() if value is not None}
    if otlp:
        env |= {
            "NIGHTSHIFT_OTLP_ENDPOINT": otlp,
            "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "false" if otlp.startswith("https://") else "true",
            "OTEL_SERVICE_NAME": "nightshift.rollout",
            "OTEL_BSP_SCHEDULE_DELAY": "1000",  # ms
        }
    env |= _cpu_env(cores) if device == "cpu" else _cuda_env(backend)
    if device == "cuda" and gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible_names([gpu], env.get("CUDA_VISIBLE_DEVICES")))
    return ServerCommand(argv, env)


def _cpu_flags() -> list[str]:
    # A block of the prefix cache is shared once it is full. vLLM's own choice of 128 tokens is longer than many a
    # prompt, so that the samples of one group would each compute theirs; 32 is the least that its fast kernel takes.
    return ["--enforce-eager", "--block-size", "32"]


def _cpu_env(cores: Sequence[int]) -> dict[str, str]:
    # Even an eager server would otherwise compile the log-prob kernel at its first request, for half a minute.
    env = {"TORCHDYNAMO_DISABLE": "1"}
    if cores:
        # vLLM's own choice pins each server of a machine to the same core.
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
        env["OMP_NUM_THREADS"] = str(len(cores))
    return env


def _cuda_flags(dtype: str) -> list[str]:
    # Graphs for decoding without torch.compile: fastest to start, and no slower than the compiled default.
    flags = ["--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})]
    if dtype == "bfloat16":
        flags += ["--attention-backend", "FLASH_ATTN"]
    # The KV cache has its own size; what is left here is only a check against free memory, which the trainer shares.
    return [*flags, "--gpu-memory-utilization", "0.05"]


def _cuda_env(backend: str) -> dict[str, str]:
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if backend == "ipc":
        # CUDA handles travel pickled in vLLM's ipc engine; only the holder of the token can send them.
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return env
