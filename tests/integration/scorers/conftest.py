import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nightshift.config import JobSpec
from services.rollout.launch import free_port
from tests.fixtures.ray_cluster import ray_cluster

VOCAB, POSITIONS = 97, 48


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random Llama of three layers whose log-probs are far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as folder:
        yield folder


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()  # below those that the kernel gives to clients meanwhile, Ray's own among them


@pytest.fixture(scope="module")
def make_spec(model_folder):
    """A job with the given rewards and the tiny model as its reference."""

    def make(*rewards: dict, **sections) -> JobSpec:
        return JobSpec(
            name="scorers",
            model={"path": model_folder},
            data={"train_files": ["unused.parquet"]},
            rewards=list(rewards),
            **{"algorithm": {"kl_coef": 0.1}, **sections},
        )

    return make
