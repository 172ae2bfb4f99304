"""The built-in model, made from the installed package."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from nightshift.data import Tokenizer
from services.agent import models

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder():
    return models.resolve("builtin:smollm2-135m-instruct")


def test_it_is_a_model_in_hf_format_that_answers(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2  # it ends its turn


def test_its_file_is_bfloat16_without_a_second_head(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 272
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192
    assert "quantization_config" not in config


def test_the_core_tokenizer_reads_it_as_transformers_does(folder):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Reply briefly."}, {"role": "user", "content": "12 + 30, please"}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.apply_chat_template(messages, add_generation_prompt=True) == text
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert list(ours.encode(text, add_special_tokens=False)) == ids
    assert ids[0] == 1
    assert 2 in ours.eos_ids
