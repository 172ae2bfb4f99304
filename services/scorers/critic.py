"""The served critic: a value model whose weights follow those that its trainer publishes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from nightshift.wire.errors import BadInputError, RoleError, WireError
from nightshift.wire.scoring import SequenceInput, SequenceResult

_ROLE = "critic"
_log = logging.getLogger(__name__)


class CriticModel:
    """A value model from a Hugging Face folder.

    Args:
        path: the folder: of a value model, or of a language model whose body is taken.
        store: folder of the published weights.
        dtype: "float32" or "bfloat16", of the weights.
        micro_batch_size: sequences per forward pass.
        threads: CPU threads of the calling thread.
        attn_implementation: "eager", "sdpa" or "flash_attention_2".
        device: "auto" (CUDA where there is a device), "cpu" or "cuda".

    Raises:
        BadInputError: the folder holds no model that can be loaded.
    """

    def __init__(
        self,
        path: str,
        store: str,
        *,
        dtype: str = "float32",
        micro_batch_size: int = 4,
        threads: int = 1,
        attn_implementation: str = "sdpa",
        device: str = "auto",
    ) -> None:
        if not (Path(path) / "config.json").is_file():
            message = f"there is no model in {path}: it has no config.json"
            raise BadInputError(message, role=_ROLE, fix="Correct scorers.critic.model or model.path")
        torch.set_num_threads(threads)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = AutoModelForTokenClassification.from_pretrained(
                path,
                num_labels=1,
                dtype=getattr(torch, dtype),
                attn_implementation=attn_implementation,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,  # a .bin file is a pickle
            )
        except Exception as error:  # of many unrelated types, those of safetensors among them
            message = f"the critic in {path} cannot be loaded: {' '.join(str(error).split())[:500]}"
            fix = "Name a folder whose architecture transformers has a token classifier for, in scorers.critic.model"
            raise BadInputError(message, role=_ROLE, fix=fix) from error
        self.model = model.requires_grad_(False).eval().to(device)
        self.path = path
        self.dtype = dtype
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.digest = ""  # of the weights that are loaded
        self._store = Path(store)
        self._micro_batch_size = micro_batch_size

    def take(self, weights: Any) -> None:
        """Loads published weights, unless they are held already.

        Where the named file is gone by now, the newest one takes its place: a call that is made again may come late.

        Args:
            weights: ``update_info`` of the publication: ``path`` below the store, and ``digest``.

        Raises:
            WireError: no such map.
            RoleError: there is no file, or it does not fit the model.
        """
        if not isinstance(weights, dict) or not isinstance(weights.get("path"), str):
            raise WireError("the call names no published weights, without which the critic has no values")
        if weights.get("digest") == self.digest:
            return
        path = self._store / Path(weights["path"]).name
        if not path.is_file():
            files = [file for file in self._store.glob("*.safetensors") if file.stem.isdigit()]
            if not files:
                message = f"there are no published weights in {self._store}"
                raise RoleError(message, role=_ROLE, fix="Start the trainer again")
            path = max(files, key=lambda file: int(file.stem))
        try:
            found = self.model.load_state_dict(load_file(path), strict=False)
        except Exception as error:
            raise RoleError(f"the published weights {path.name} cannot be loaded: {error}", role=_ROLE) from error
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        if found.unexpected_keys or set(found.missing_keys) - tied:
            names = [*found.unexpected_keys, *found.missing_keys]
            raise RoleError(f"the published weights {path.name} do not fit the model: {names[0]}", role=_ROLE)
        self.digest = str(weights.get("digest", ""))

    def score(self, samples: Sequence[SequenceInput]) -> list[SequenceResult]:
        """Values of the states before each response token, in the order of the request.

        Raises:
            WireError: a sample is malformed or holds an id outside the vocabulary.
        """
        for index, sample in enumerate(samples):
            self._check(sample, index)
        order = sorted(
            (index for index, sample in enumerate(samples) if len(sample["response_ids"])),
            key=lambda index: (len(samples[index]["prompt_ids"]) + len(samples[index]["response_ids"]), index),
        )
        values: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
        for start in range(0, len(order), self._micro_batch_size):
            part = order[start : start + self._micro_batch_size]
            for index, result in zip(part, self._values([samples[i] for i in part]), strict=True):
                values[index] = result
        return [
            SequenceResult(id=sample["id"], logprobs=result, token_ids=sample["response_ids"])
            for sample, result in zip(samples, values, strict=True)
        ]

    @torch.no_grad()
    def _values(self, samples: Sequence[SequenceInput]) -> list[np.ndarray]:
        rows = [np.concatenate([sample["prompt_ids"], sample["response_ids"]])[:-1] for sample in samples]
        width = max(map(len, rows))
        ids_BL = torch.zeros((len(rows), width), dtype=torch.long)
        mask_BL = torch.zeros((len(rows), width), dtype=torch.long)
        for b, row in enumerate(rows):
            ids_BL[b, : len(row)] = torch.from_numpy(row.astype(np.int64))
            mask_BL[b, : len(row)] = 1
        device = self.model.device
        values_BL = self.model(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits[..., 0].float()
        found = []
        for b, sample in enumerate(samples):
            first = len(sample["prompt_ids"]) - 1
            found.append(values_BL[b, first : first + len(sample["response_ids"])].cpu().numpy())
        return found

    def _check(self, sample: Any, index: int) -> None:
        if not isinstance(sample, dict) or not isinstance(sample.get("id"), str):
            raise WireError(f"sample {index} is no map with a text 'id'")
        for key in ("prompt_ids", "response_ids"):
            ids = sample.get(key)
            if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise WireError(f"sample {sample['id']}: {key} is not an array of token ids")
            if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
                raise WireError(f"sample {sample['id']}: {key} holds an id outside the vocabulary of {self.vocab_size}")
        if not len(sample["prompt_ids"]):
            raise WireError(f"sample {sample['id']}: prompt_ids is empty")
