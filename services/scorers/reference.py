"""The frozen reference model: log-probs of response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nightshift.wire.scoring import SequenceInput, SequenceResult
from services.scorers.frozen import device_of, load_frozen
from services.scorers.sequences import TokenSequence, check_sequence, described, padded, passes


@torch.inference_mode()
def response_log_probs(
    model: Any, sequences: Sequence[TokenSequence], seen: list[dict[str, Any]] | None = None
) -> list[np.ndarray]:
    """Log-probs of the response tokens of a micro-batch of B sequences, in one forward pass.

    Token t of a response is predicted at the position before it. The logits are divided by the temperature and
    normalised in float32, as the sampler does: log p(t) = x_t / tau - logsumexp(x / tau).

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        seen: takes a description of the tensors of the first pass, where it is empty.

    Returns:
        B arrays [T_b] of float32.
    """
    device = next(model.parameters()).device
    ids_BL, mask_BL = padded([np.concatenate([s.prompt_ids, s.response_ids]) for s in sequences], device)
    # Logits of a vocabulary are by far the largest tensor: only the positions that predict a response token of some
    # row go through the head.
    first = min(len(sequence.prompt_ids) for sequence in sequences) - 1
    kept = torch.arange(first, ids_BL.shape[1] - 1, device=device)
    logits_BKV = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False, logits_to_keep=kept).logits
    if seen is not None and not seen:
        seen += described(input_ids=ids_BL, attention_mask=mask_BL, logits=logits_BKV)
    results = []
    for b, sequence in enumerate(sequences):
        at = len(sequence.prompt_ids) - 1 - first
        logits_TV = logits_BKV[b, at : at + len(sequence.response_ids)].float() / sequence.temperature
        ids_T1 = torch.from_numpy(sequence.response_ids.astype(np.int64)).to(device).unsqueeze(1)
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
        torch.set_num_threads(threads)
        model = load_frozen(
            AutoModelForCausalLM,
            path,
            "model",
            role="reference",
            setting="scorers.reference.model or model.path",
            fix="Name a folder with a causal language model",
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
        )
        self.model = model.to(device_of(device))
        self.path = path
        self.dtype = dtype
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.max_positions = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 2**31))
        self._micro_batch_size = micro_batch_size

    def score(self, samples: Sequence[SequenceInput]) -> list[SequenceResult]:
        """Log-probs of each sample's response tokens, in the order of the request.

        Raises:
            WireError: a sample is malformed, too long for the model, or holds an id outside the vocabulary.
        """
        sequences = [check_sequence(s, at, self.vocab_size, self.max_positions) for at, s in enumerate(samples)]
        logprobs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        seen: list[dict[str, Any]] = []
        for part in passes(sequences, self._micro_batch_size):
            here = [sequences[at] for at in part]
            for at, found in zip(part, response_log_probs(self.model, here, seen), strict=True):
                logprobs[at] = found
        results = [
            SequenceResult(id=sequence.id, logprobs=found, token_ids=sequence.response_ids)
            for sequence, found in zip(sequences, logprobs, strict=True)
        ]
        if seen:
            results[0]["tensors"] = seen
        return results
