"""Rewards by models: a sequence classifier, and the similarity of sentence embeddings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from nightshift.wire.errors import BadInputError
from nightshift.wire.scoring import RewardResult
from services.scorers.frozen import device_of, load_frozen
from services.scorers.results import prompt_text, result

_ROLE = "reward"


class ClassifierScorer:
    """A Hugging Face sequence classifier over prompt and response.

    With a chat template in its tokenizer the two become one conversation, as reward models are trained; else a pair of
    texts.

    Args:
        settings: fields of :class:`nightshift.config.rewards.ClassifierReward`.
        device: "auto", "cpu" or "cuda".

    Raises:
        BadInputError: no classifier in the folder, or it has no class of that number.
    """

    def __init__(self, settings: Mapping[str, Any], device: str) -> None:
        self._settings = settings
        torch.set_num_threads(settings["threads"])
        self._device = device_of(device)
        self.model = _load(AutoModelForSequenceClassification, settings["model"], "classifier").to(self._device)
        self._tokenizer = _tokenizer(settings["model"])
        if settings["label"] >= self.model.config.num_labels:
            raise BadInputError(
                f"rewards[].label is {settings['label']}, the classifier in {settings['model']} has "
                f"{self.model.config.num_labels} classes",
                role=_ROLE,
                fix=f"Choose one of 0 to {self.model.config.num_labels - 1}",
            )
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self._tokenizer.pad_token_id

    def score(self, samples: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """Scores in the order of the samples."""
        began, size = time.perf_counter(), self._settings["micro_batch_size"]
        scores: list[float] = []
        for at in range(0, len(samples), size):
            scores += self._some(samples[at : at + size])
        return [result(sample, score, began) for sample, score in zip(samples, scores, strict=True)]

    @torch.inference_mode()
    def _some(self, samples: Sequence[Mapping[str, Any]]) -> list[float]:
        self._tokenizer.truncation_side = "left"
        limits = {
            "padding": True,
            "truncation": True,
            "max_length": self._settings["max_length"],
            "return_tensors": "pt",
        }
        if self._tokenizer.chat_template:
            texts = [self._conversation(sample) for sample in samples]
            inputs = self._tokenizer(texts, add_special_tokens=False, **limits)
        else:
            limits["truncation"] = "longest_first"
            prompts = [prompt_text(sample.get("prompt")) for sample in samples]
            inputs = self._tokenizer(prompts, [sample["response"] for sample in samples], **limits)
        logits = self.model(**inputs.to(self._device)).logits.float()
        if self._settings["activation"] == "sigmoid":
            logits = logits.sigmoid()
        elif self._settings["activation"] == "softmax":
            logits = logits.softmax(-1)
        return [float(value) for value in logits[:, self._settings["label"]]]

    def _conversation(self, sample: Mapping[str, Any]) -> str:
        prompt = sample.get("prompt")
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        turns.append({"role": "assistant", "content": sample["response"]})
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False))


class EmbeddingScorer:
    """Cosine of the mean-pooled embeddings of the response and the right answer.

    Args:
        settings: fields of :class:`nightshift.config.rewards.EmbeddingReward`.
        device: "auto", "cpu" or "cuda".

    Raises:
        BadInputError: no encoder in the folder.
    """

    def __init__(self, settings: Mapping[str, Any], device: str) -> None:
        self._settings = settings
        torch.set_num_threads(settings["threads"])
        self._device = device_of(device)
        self.model = _load(AutoModel, settings["model"], "encoder").to(self._device)
        self._tokenizer = _tokenizer(settings["model"])
        self._known: dict[str, Tensor] = {}  # embeddings of right answers, which come back for each sample of a group

    def score(self, samples: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """Scores in the order of the samples; without a right answer a sample is unscored."""
        began = time.perf_counter()
        usable = [sample for sample in samples if isinstance(sample.get("ground_truth"), str)]
        new = list(dict.fromkeys(s["ground_truth"] for s in usable if s["ground_truth"] not in self._known))
        if len(self._known) > 4096:
            self._known.clear()
            new = list(dict.fromkeys(s["ground_truth"] for s in usable))
        self._known |= dict(zip(new, self._embed(new), strict=True))
        responses = self._embed([sample["response"] for sample in usable])
        scores = {
            sample["id"]: float(vector @ self._known[sample["ground_truth"]])
            for sample, vector in zip(usable, responses, strict=True)
        }
        return [
            result(sample, scores[sample["id"]], began)
            if sample["id"] in scores
            else result(sample, None, began, "none", "the row has no text as its ground_truth")
            for sample in samples
        ]

    @torch.inference_mode()
    def _embed(self, texts: Sequence[str]) -> list[Tensor]:
        """Unit vectors [D] of the texts."""
        vectors: list[Tensor] = []
        for at in range(0, len(texts), self._settings["micro_batch_size"]):
            part = list(texts[at : at + self._settings["micro_batch_size"]])
            inputs = self._tokenizer(
                part, padding=True, truncation=True, max_length=self._settings["max_length"], return_tensors="pt"
            ).to(self._device)
            states_BLD = self.model(**inputs).last_hidden_state.float()
            mask_BL1 = inputs["attention_mask"].unsqueeze(-1).float()
            mean_BD = (states_BLD * mask_BL1).sum(1) / mask_BL1.sum(1).clamp(min=1)
            vectors += list(torch.nn.functional.normalize(mean_BD, dim=-1).cpu())
        return vectors


def _load(kind: Any, path: str, what: str) -> Any:
    spare = ("pooler", "position_ids")
    return load_frozen(
        kind, path, what, role=_ROLE, setting="its model", fix="Name another folder in its model", spare=spare
    )


def _tokenizer(path: str) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        message = f"the tokenizer in {path} cannot be loaded: {' '.join(str(error).split())[:500]}"
        raise BadInputError(message, role=_ROLE, fix="Save the tokenizer beside the model") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
