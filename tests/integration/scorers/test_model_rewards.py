"""Rewards by models: a classifier and a sentence encoder, with real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from nightshift.config.rewards import ClassifierReward, EmbeddingReward
from nightshift.wire.errors import BadInputError
from services.agent.models import resolve
from services.scorers.model_rewards import ClassifierScorer, EmbeddingScorer
from tests.fixtures.tiny_model import VOCAB_SIZE, build_tiny_model, build_tiny_tokenizer

pytestmark = pytest.mark.integration


def sample(at: int, response: str, answer: Any = "a dog runs") -> dict[str, Any]:
    prompt = [{"role": "user", "content": "say it"}]
    return {"id": f"g0.{at}", "prompt": prompt, "response": response, "ground_truth": answer}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=2,
        pad_token_id=0,
        initializer_range=0.5,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return build_tiny_tokenizer(folder)


def test_a_classifier_reads_prompt_and_response_as_one_conversation(classifier: Path) -> None:
    settings = ClassifierReward(model=str(classifier), label=1, activation="softmax", micro_batch_size=2)
    scorer = ClassifierScorer(settings.model_dump(mode="json"), "cpu")
    samples = [sample(at, text) for at, text in enumerate(["yes", "a much longer answer than that", "no"])]
    scores = [result["score"] for result in scorer.score(samples)]
    assert all(score is not None and 0 < score < 1 for score in scores)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    text = "<bos>user:say it<eot>assistant:yes<eot>"
    with torch.no_grad():
        logits = scorer.model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits
    assert scores[0] == pytest.approx(float(logits.softmax(-1)[0, 1]), abs=1e-5)  # padding changes nothing
    raw = ClassifierScorer(ClassifierReward(model=str(classifier)).model_dump(mode="json"), "cpu")
    assert raw.score(samples[:1])[0]["score"] == pytest.approx(float(logits[0, 0]), abs=1e-5)


def test_what_is_no_classifier_is_refused_by_name(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="label is 5"):
        ClassifierScorer(ClassifierReward(model=str(classifier), label=5).model_dump(mode="json"), "cpu")
    with pytest.raises(BadInputError, match=r"no config\.json"):
        ClassifierScorer(ClassifierReward(model=str(tmp_path)).model_dump(mode="json"), "cpu")
    language_model = build_tiny_model(tmp_path / "lm")
    with pytest.raises(BadInputError, match="no weights for score"):
        ClassifierScorer(ClassifierReward(model=str(language_model)).model_dump(mode="json"), "cpu")


def test_the_encoder_of_the_package_finds_what_means_the_same() -> None:
    settings = EmbeddingReward().model_dump(mode="json") | {"model": str(resolve("builtin:all-minilm-l6-v2"))}
    scorer = EmbeddingScorer(settings, "cpu")
    texts = ["a dog runs", "The puppy is running.", "Inflation rose in March."]
    results = scorer.score([sample(at, text) for at, text in enumerate(texts)])
    same, close, far = (result["score"] for result in results)
    assert same == pytest.approx(1.0, abs=1e-4)
    assert close > 0.5 > 0.3 > far
    again = scorer.score([sample(0, texts[1]), sample(1, "x", answer=None)])
    assert again[0]["score"] == pytest.approx(close, abs=1e-5)  # whatever shares the batch
    assert (again[1]["score"], again[1]["error_type"]) == (None, "none")
