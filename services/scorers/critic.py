"""The served critic: a value model whose weights follow those that its trainer publishes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from nightshift.wire.errors import RoleError, WireError
from nightshift.wire.scoring import SequenceInput, SequenceResult
from services.scorers.frozen import device_of, load_frozen
from services.scorers.sequences import TokenSequence, check_sequence, described, padded, passes

_ROLE = "critic"


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
        torch.set_num_threads(threads)
        model = load_frozen(
            AutoModelForTokenClassification,
            path,
            "critic",
            role=_ROLE,
            setting="scorers.critic.model or model.path",
            fix="Name a folder whose architecture transformers has a token classifier for, in scorers.critic.model",
            spare=None,  # all weights come with the first publication
            num_labels=1,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
        )
        self.model = model.to(device_of(device))
        self.path = path
        self.dtype = dtype
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.max_positions = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 2**31))
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
            WireError: a sample is malformed, too long for the model, or holds an id outside the vocabulary.
        """
        sequences = [check_sequence(s, at, self.vocab_size, self.max_positions) for at, s in enumerate(samples)]
        values: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        seen: list[dict[str, Any]] = []
        for part in passes(sequences, self._micro_batch_size):
            for at, found in zip(part, self._values([sequences[at] for at in part], seen), strict=True):
                values[at] = found
        results = [
            SequenceResult(id=sequence.id, logprobs=found, token_ids=sequence.response_ids)
            for sequence, found in zip(sequences, values, strict=True)
        ]
        if seen:
            results[0]["tensors"] = seen
        return results

    @torch.no_grad()
    def _values(self, sequences: Sequence[TokenSequence], seen: list[dict[str, Any]]) -> list[np.ndarray]:
        rows = [np.concatenate([sequence.prompt_ids, sequence.response_ids])[:-1] for sequence in sequences]
        ids_BL, mask_BL = padded(rows, self.model.device)
        values_BL = self.model(input_ids=ids_BL, attention_mask=mask_BL).logits[..., 0].float()
        if not seen:
            seen += described(input_ids=ids_BL, attention_mask=mask_BL, values=values_BL)
        found = []
        for b, sequence in enumerate(sequences):
            first = len(sequence.prompt_ids) - 1
            found.append(values_BL[b, first : first + len(sequence.response_ids)].cpu().numpy())
        return found
