"""Random models for measurements: the shape of a real one, a tokenizer whose every id decodes.

python -m tests.gpu.models FOLDER [--shape small|1.5b] --tokenizer DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

#: Shapes by name; "1.5b" is that of Qwen2.5-1.5B.
SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 49152,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}


def build(folder: Path, shape: str, tokenizer: Path, seed: int = 1) -> None:
    """Writes a Qwen2 model with random bfloat16 weights, made on the GPU where there is one.

    Args:
        tokenizer: folder with tokenizer.json (byte-level BPE); made-up words fill its vocabulary up to the model's.
        seed: of the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(seed)
    config = Qwen2Config(
        **SHAPES[shape],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for path in (*tokenizer.glob("tokenizer*.json"), *tokenizer.glob("*.jinja")):
        shutil.copy(path, folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(filled(json.loads(file.read_text()), config.vocab_size), ensure_ascii=False))


def filled(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """A tokenizer with a word for each id below ``size``: otherwise most sampled ids would not decode."""
    vocabulary = tokenizer["model"]["vocab"]
    taken = set(vocabulary.values()) | {token["id"] for token in tokenizer.get("added_tokens", [])}
    vocabulary |= {f"\u0120w{index}": index for index in range(size) if index not in taken}
    return tokenizer


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments = parser.parse_args()
    began = time.time()
    build(arguments.folder, arguments.shape, arguments.tokenizer)
    print(f"{arguments.shape} model in {arguments.folder}: {time.time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
