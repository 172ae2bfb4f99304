"""TRL's GRPOTrainer on the demo's task, as a peer: runs in a virtual environment of its own.

PEER/bin/python -m tests.bench.real.trl_driver SETTINGS.json

Prints a JSON line for each step. Lengths are forced by a logits processor: the end mark is forbidden before a sample's
length and certain at it, so that each sample has as many tokens as in the other arm, its end mark among them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import uuid
from pathlib import Path
from typing import Any

# Read by OpenMP and the C library at the start of the process; the bench sets them, this is for a call by hand.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from datasets import Dataset, fingerprint
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback

from tests.bench.real.lengths import Lengths


class ForcedEnds(LogitsProcessor):
    """Forbids the end marks before each row's length, and leaves nothing else at it."""

    def __init__(self, lengths: list[int], prompt: int, end: int, ends: list[int]) -> None:
        self._last = torch.tensor(lengths) - 1
        self._prompt, self._end, self._ends = prompt, end, ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Changes the scores [B, V] of the next token."""
        drawn = input_ids.shape[1] - self._prompt
        scores[:, self._ends] = -float("inf")
        over = self._last <= drawn
        scores[over] = -float("inf")
        scores[over, self._end] = 0.0
        return scores


class Watch(TrainerCallback):
    """Notes the time of each step."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins with its generation."""
        now = time.time()
        self.began = self.began or now

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Its update is made."""
        self.ended = time.time()

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float] | None = None, **___: Any) -> None:
        """Metrics of the step."""
        if logs and "reward" in logs:
            line = {
                "step": state.global_step,
                "seconds": round(self.ended - self.began, 3),
                "reward": logs["reward"],
                "response_length": logs["completions/mean_length"],
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
            print(json.dumps(line), flush=True)


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The same reward as ``tests/gpu/reward.py``."""
    return [sum(ids) % 1009 / 1009 for ids in completion_ids]


def right(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """The demo's reward."""
    return [float(c[0]["content"].strip() == truth) for c, truth in zip(completions, ground_truth, strict=True)]


def main() -> None:
    """The command."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    # Fingerprints of data sets are not needed, and their hashing cannot pickle some versions of pyarrow.
    fingerprint.Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex[:16])
    fingerprint.Hasher.update = lambda self, value: self.m.update(uuid.uuid4().bytes)
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    prompts, samples, parts = settings["prompts"], settings["samples"], settings["micro_batches"]
    config = GRPOConfig(
        output_dir=settings["work"],
        per_device_train_batch_size=prompts * samples // parts,
        gradient_accumulation_steps=parts,
        num_generations=samples,
        max_completion_length=settings["longest"],
        beta=0.0,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=settings["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=settings["autocast"],
        gradient_checkpointing=False,
        temperature=1.0,
        seed=settings["seed"],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": settings["dtype"], "attn_implementation": settings["attention"]},
        use_transformers_continuous_batching=settings["continuous"],
    )
    watch = Watch()
    trainer = GRPOTrainer(
        model=settings["model"],
        args=config,
        train_dataset=Dataset.from_list(json.loads(Path(settings["rows"]).read_text())),
        reward_funcs=spread if settings["lengths"] else right,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    if settings["lengths"]:
        force(trainer.model, Lengths.from_text(settings["lengths"]), settings, tokenizer)
    trainer.train()


def force(model: Any, lengths: Lengths, settings: dict[str, Any], tokenizer: Any) -> None:
    """Has the model's ``generate`` end each row at its length; each call draws the next batch."""
    plain, calls = model.generate, [settings["first"]]
    ends = model.generation_config.eos_token_id
    ends = sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})

    def generate(**inputs: Any) -> Any:
        wanted = lengths.batch(calls[0], settings["prompts"], settings["samples"])
        calls[0] += 1
        processor = ForcedEnds(wanted, inputs["input_ids"].shape[1], tokenizer.eos_token_id, ends)
        return plain(**inputs, logits_processor=LogitsProcessorList([processor]))

    model.generate = generate


if __name__ == "__main__":
    main()
