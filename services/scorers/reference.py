"""The frozen reference model: log-probs of response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nightshift.wire.errors import BadInputError, WireError
from nightshift.wire.scoring import SequenceInput, SequenceResult

_ROLE = "reference"


@torch.inference_mode()
def response_log_probs(
    model: Any, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperatures: Sequence[float]
) -> list[np.ndarray]:
    """Log-probs of the response tokens of a micro-batch of B sequences, in one forward pass.

    Token t of a response is predicted at the position before it. The logits are divided by the temperature and
    normalised in float32, as the sampler does: log p(t) = x_t / tau - logsumexp(x / tau).

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        prompt_ids: B arrays [P_b] of int32, P_b > 0.
        response_ids: B arrays [T_b] of int32.
        temperatures: B divisors of the logits.

    Returns:
        B arrays [T_b] of float32.
    """
    device = next(model.parameters()).device
    rows = [np.concatenate(pair) for pair in zip(prompt_ids, response_ids, strict=True)]
    width = max(len(row) for row in rows)
    # Padding on the right is never attended to by the tokens before it, and its own logits are not looked at.
    ids_BL = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BL = torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        ids_BL[b, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask_BL[b, : len(row)] = 1
    # Logits of a vocabulary are by far the largest tensor: only the positions that predict a response token of some
    # row go through the head.
    first = min(len(prompt) for prompt in prompt_ids) - 1
    kept = torch.arange(first, width - 1, device=device)
    logits_BKV = model(
        input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device), use_cache=False, logits_to_keep=kept
    ).logits
    results = []
    for b, (prompt, response, temperature) in enumerate(zip(prompt_ids, response_ids, temperatures, strict=True)):
        at = len(prompt) - 1 - first
        logits_TV = logits_BKV[b, at : at + len(response)].float() / temperature
        ids_T1 = torch.from_numpy(response.astype(np.int64)).to(device).unsqueeze(1)
        logprobs_T = torch.log_softmax(logits_TV, dim=-1).gather(1, ids_T1).squeeze(1)
        results.append(logprobs_T.cpu().numpy().astype(np.float32))
    return results


class ReferenceModel:
    """A causal language model from a Hugging Face folder, never trained.

    Args:
        path: the folder.
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
        *,
        dtype: str = "float32",
        micro_batch_size: int = 8,
        threads: int = 1,
        attn_implementation: str = "sdpa",
        device: str = "auto",
    ) -> None:
        if not (Path(path) / "config.json").is_file():
            message = f"there is no model in {path}: it has no config.json"
            raise BadInputError(message, role=_ROLE, fix="Correct scorers.reference.model or model.path")
        torch.set_num_threads(threads)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, dtype),
                attn_implementation=attn_implementation,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,  # a .bin file is a pickle
            )
        except Exception as error:  # of many unrelated types, those of safetensors among them
            message = f"the model in {path} cannot be loaded: {' '.join(str(error).split())[:500]}"
            raise BadInputError(message, role=_ROLE, fix="Name a folder with a causal language model") from error
        self.model = model.requires_grad_(False).eval().to(device)
        self.path = path
        self.dtype = dtype
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.max_positions = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 2**31))
        self._micro_batch_size = micro_batch_size

    def score(self, samples: Sequence[SequenceInput]) -> list[SequenceResult]:
        """Log-probs of each sample's response tokens, in the order of the request.

        Samples of like length share a forward pass; which ones do depends on the request alone.

        Raises:
            WireError: a sample is malformed, too long for the model, or holds an id outside the vocabulary.
        """
        checked = [self._check(sample, index) for index, sample in enumerate(samples)]
        logprobs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(checked)
        todo = sorted(
            (index for index, (_, _, response, _) in enumerate(checked) if len(response)),
            key=lambda index: (len(checked[index][1]) + len(checked[index][2]), index),
        )
        for start in range(0, len(todo), self._micro_batch_size):
            part = todo[start : start + self._micro_batch_size]
            _, prompts, responses, temperatures = zip(*(checked[index] for index in part), strict=True)
            for index, result in zip(
                part, response_log_probs(self.model, prompts, responses, temperatures), strict=True
            ):
                logprobs[index] = result
        return [
            SequenceResult(id=sample_id, logprobs=result, token_ids=response)
            for (sample_id, _, response, _), result in zip(checked, logprobs, strict=True)
        ]

    def _check(self, sample: Any, index: int) -> tuple[str, np.ndarray, np.ndarray, float]:
        if not isinstance(sample, dict) or not isinstance(sample.get("id"), str):
            raise WireError(f"sample {index} is no map with a text 'id'")
        name = sample["id"]
        prompt, response = (self._ids(sample.get(key), key, name) for key in ("prompt_ids", "response_ids"))
        if not len(prompt):
            raise WireError(f"sample {name}: prompt_ids is empty, so that nothing predicts the first response token")
        if len(prompt) + len(response) > self.max_positions:
            length = f"{len(prompt)} + {len(response)} tokens"
            raise WireError(f"sample {name}: {length} are more than the model's {self.max_positions} positions")
        temperature = sample.get("temperature", 1.0)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < np.inf:
            raise WireError(f"sample {name}: temperature is {temperature!r}, expected a number above 0")
        return name, prompt, response, float(temperature)

    def _ids(self, value: Any, key: str, name: str) -> np.ndarray:
        """Token ids as int32; a plain list of ints is taken too, since other languages may send one."""
        array = np.asarray(value)
        if array.size == 0 and array.ndim == 1:
            return np.zeros(0, np.int32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise WireError(f"sample {name}: {key} is not a list of token ids")
        if array.min() < 0 or array.max() >= self.vocab_size:
            bad = array[(array < 0) | (array >= self.vocab_size)][0]
            raise WireError(f"sample {name}: {key} holds {bad}, the vocabulary has {self.vocab_size} ids")
        return array.astype(np.int32)
