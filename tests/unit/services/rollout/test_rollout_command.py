"""The server's command line and environment."""

import importlib
import importlib.metadata
import json
from pathlib import Path

import pytest

from nightshift.config.job import JobSpec
from services.rollout.command import context_length, server_command
from services.rollout.plugin import BACKEND


def spec_of(**rollout):
    return JobSpec.model_validate(
        {
            "name": "t",
            "model": {"path": "/models/m"},
            "data": {"train_files": ["a.parquet"], "max_prompt_length": 100},
            "rewards": [{"function": "r.py:f"}],
            "rollout": {"max_response_length": 20, "kv_cache_gib": 0.5, **rollout},
            "trainer": {"seed": 7},
        }
    )


def command(spec=None, **arguments):
    defaults = {"port": 21000, "token": "tok", "store": Path("/store"), "base_env": {"PATH": "/bin"}}
    return server_command(spec or spec_of(), **{**defaults, **arguments})


def value(argv, flag):
    return argv[len(argv) - 1 - argv[::-1].index(flag) + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_every_server_has(device):
    made = command(device=device, otlp="http://127.0.0.1:4317")
    argv, env = made.argv, made.env
    assert value(argv, "--host") == "127.0.0.1"
    assert value(argv, "--port") == "21000"
    assert value(argv, "--logprobs-mode") == "processed_logprobs"
    assert value(argv, "--generation-config") == "vllm"
    # The last middleware is the outermost: nothing reaches the route past the guard.
    assert [argv[at + 1] for at, flag in enumerate(argv) if flag == "--middleware"] == [
        "services.rollout.route.Route",
        "services.rollout.guard.Guard",
    ]
    assert value(argv, "--kv-cache-memory-bytes") == str(1 << 29)
    assert value(argv, "--max-model-len") == "121"
    assert value(argv, "--otlp-traces-endpoint") == "http://127.0.0.1:4317"
    assert value(argv, "--seed") == "7"
    assert "--enable-request-id-headers" in argv
    assert "tok" not in argv  # a command line is for everyone to see
    assert env["NIGHTSHIFT_ROLLOUT_TOKEN"] == "tok"
    assert env["NIGHTSHIFT_WEIGHT_STORE"] == "/store"
    assert env["VLLM_SERVER_DEV_MODE"] == env["VLLM_NO_USAGE_STATS"] == env["HF_HUB_OFFLINE"] == "1"
    assert env["OTEL_EXPORTER_OTLP_TRACES_INSECURE"] == "true"
    assert env["PATH"] == "/bin"


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_server_that_is_to_sleep_is_told_at_its_start(sleeps):
    job = spec_of().model_copy(update={"rollout": spec_of().rollout.model_copy(update={"sleep_mode": sleeps})})
    assert ("--enable-sleep-mode" in command(job, device="cuda").argv) is sleeps


@pytest.mark.parametrize(("version", "known"), [((0, 26), False), ((0, 29), False), ((0, 30), True), ((0, 33), True)])
def test_a_flag_is_given_to_the_versions_that_know_it(version, known):
    assert ("--enable-scale-out" in command(vllm_version=version).argv) is known


def test_a_cpu_server():
    made = command(cores=[2, 3])
    assert "--enforce-eager" in made.argv
    assert json.loads(value(made.argv, "--weight-transfer-config")) == {"backend": "safetensors"}
    assert made.env["TORCHDYNAMO_DISABLE"] == "1"
    assert made.env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command().env
    assert "--otlp-traces-endpoint" not in made.argv


def test_a_cuda_server_sees_its_own_device_only():
    assert "CUDA_VISIBLE_DEVICES" not in command(device="cpu", gpu=1).env
    assert command(device="cuda", gpu=1).env["CUDA_VISIBLE_DEVICES"] == "1"
    outside = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert command(device="cuda", gpu=1, base_env=outside).env["CUDA_VISIBLE_DEVICES"] == "GPU-b"


def test_a_cuda_server():
    made = command(spec_of(dtype="bfloat16"), device="cuda", cores=[0])
    assert "--enforce-eager" not in made.argv
    assert json.loads(value(made.argv, "--compilation-config")) == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert value(made.argv, "--attention-backend") == "FLASH_ATTN"
    assert json.loads(value(made.argv, "--weight-transfer-config")) == {"backend": "ipc"}
    assert made.env["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in made.env
    assert "VLLM_CPU_OMP_THREADS_BIND" not in made.env
    other = command(device="cuda", weight_backend="nccl")  # float32: FlashAttention has no such kernel
    assert "--attention-backend" not in other.argv
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in other.env


def test_the_users_own_arguments_come_last_and_win():
    argv = command(spec_of(extra_args=["--max-num-seqs", "3"])).argv
    assert argv[-2:] == ["--max-num-seqs", "3"]
    assert value(argv, "--max-num-seqs") == "3"


def test_settings_of_the_shell_that_would_change_the_server_are_dropped():
    noise = {"VLLM_API_KEY": "k", "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_LOGGING_LEVEL": "DEBUG"}
    env = command(base_env=noise).env
    assert not {"VLLM_API_KEY", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"} & env.keys()
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize(
    ("rollout", "positions", "expected"),
    [({}, None, 121), ({}, 4096, 121), ({}, 64, 64), ({"max_model_len": 99}, 64, 99)],
)
def test_the_context_is_prompt_and_response_as_far_as_the_model_goes(rollout, positions, expected):
    assert context_length(spec_of(**rollout), positions) == expected


def test_vllm_finds_the_plugin_through_the_checked_in_entry_point():
    site = command().env["PYTHONPATH"].split(":")[0]
    (distribution,) = importlib.metadata.distributions(path=[site])
    (entry,) = distribution.entry_points
    assert entry.group == "vllm.general_plugins"
    assert entry.load() is importlib.import_module("services.rollout.plugin").register
    assert BACKEND == "safetensors"
