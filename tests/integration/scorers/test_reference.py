import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from nightshift.wire.errors import BadInputError, WireError
from services.scorers.reference import ReferenceModel

pytestmark = pytest.mark.integration

VOCAB, POSITIONS = 97, 48  # of the model in conftest.py


def sequences(seed: int, count: int) -> list:
    draw = np.random.default_rng(seed)
    return [
        {
            "id": f"s{index}",
            "prompt_ids": draw.integers(0, VOCAB, draw.integers(1, 20)).astype(np.int32),
            "response_ids": draw.integers(0, VOCAB, draw.integers(0, 20)).astype(np.int32),
            "temperature": float(draw.choice([0.5, 1.0, 2.0])),
        }
        for index in range(count)
    ]


def naive(model, sample) -> list[float]:
    """One forward pass per token over the unpadded prefix, in double precision after the logits."""
    prompt, response = sample["prompt_ids"].tolist(), sample["response_ids"].tolist()
    result = []
    for at, token in enumerate(response):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response[:at]])).logits[0, -1].double() / sample["temperature"]
        result.append((logits[token] - torch.logsumexp(logits, 0)).item())
    return result


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_log_probs_equal_a_naive_loop(model_folder, micro_batch_size, attention):
    reference = ReferenceModel(model_folder, micro_batch_size=micro_batch_size, attn_implementation=attention)
    plain = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    samples = sequences(1, 11)
    results = reference.score(samples)
    assert [result["id"] for result in results] == [sample["id"] for sample in samples]
    for sample, result in zip(samples, results, strict=True):
        assert result["logprobs"].dtype == np.float32
        assert result["logprobs"].shape == sample["response_ids"].shape
        np.testing.assert_array_equal(result["token_ids"], sample["response_ids"])
        np.testing.assert_allclose(result["logprobs"], naive(plain, sample), atol=2e-5, rtol=2e-5)
    spread = np.concatenate([result["logprobs"] for result in results])
    assert spread.min() < -8 < -2 < spread.max()  # the model is not near uniform, so that a shift would show


def test_bfloat16_weights_give_float32_log_probs_near_the_exact_ones(model_folder):
    samples = sequences(2, 6)
    exact = ReferenceModel(model_folder).score(samples)
    rough = ReferenceModel(model_folder, dtype="bfloat16").score(samples)
    for other in rough:
        assert other["logprobs"].dtype == np.float32
        assert (other["logprobs"] <= 0).all()
    difference = np.concatenate([one["logprobs"] - other["logprobs"] for one, other in zip(exact, rough, strict=True)])
    assert 0 < np.abs(difference).mean() < 0.5


def test_a_single_prompt_token_is_enough_and_the_temperature_defaults_to_one(model_folder):
    reference = ReferenceModel(model_folder)
    sample = {"id": "a", "prompt_ids": [5], "response_ids": [6, 7]}
    (plain,) = reference.score([sample])
    (hot,) = reference.score([{**sample, "temperature": 1}])
    np.testing.assert_array_equal(plain["logprobs"], hot["logprobs"])


def test_what_does_not_fit_the_model_is_refused_by_name(model_folder):
    reference = ReferenceModel(model_folder)
    good = {"id": "a", "prompt_ids": np.array([1]), "response_ids": np.array([2])}
    for change, words in [
        ({"response_ids": np.array([VOCAB])}, f"response_ids holds {VOCAB}, the vocabulary has {VOCAB} ids"),
        ({"prompt_ids": np.array([-1])}, "prompt_ids holds -1"),
        ({"prompt_ids": np.array([], dtype=np.int32)}, "prompt_ids is empty"),
        ({"response_ids": np.ones(POSITIONS, np.int32)}, f"1 \\+ {POSITIONS} tokens are more than the model's"),
        ({"response_ids": np.array([1.5])}, "response_ids is not a list of token ids"),
        ({"response_ids": "text"}, "response_ids is not a list of token ids"),
        ({"response_ids": None}, "response_ids is not a list of token ids"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"id": 3}, "sample 1 is no map with a text 'id'"),
    ]:
        with pytest.raises(WireError, match=words):
            reference.score([good, {**good, **change}])


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"has no config\.json") as caught:
        ReferenceModel(str(tmp_path))
    assert caught.value.role == "reference"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadInputError, match="cannot be loaded"):
        ReferenceModel(str(tmp_path))


def test_a_folder_that_lacks_weights_is_refused(model_folder, tmp_path):
    """Else transformers would fill them with random numbers."""
    shutil.copytree(model_folder, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name in sorted(weights) if "mlp" in name)
    del weights[name]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=f"has no weights for {name}"):
        ReferenceModel(str(tmp_path / "model"))
