"""Reinforcement learning as a plain loop: one thing after the other, without orchestrator, Ray or pipeline.

What ``pipeline.deterministic`` must equal bit for bit. It uses the same model code (a rank, a reference, a vLLM
server), and none of what schedules them.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq

from nightshift.config import JobSpec
from nightshift.data import Cursor, Tokenizer, load_prompts
from nightshift.wire.experience import LossSpec, Sample, VersionSpan
from services.rollout.launch import VllmServer
from services.scorers.reference import ReferenceModel
from services.trainer.config import RankConfig
from services.trainer.rank import TrainerRank
from tests.integration.run.reward import score


def train_on(spec: JobSpec, rollouts: Path, folder: Path) -> Path:
    """Makes the steps of a GRPO job on samples that another run drew, a whole batch at a time.

    Args:
        rollouts: folder of the run's parquet files: prompts, sampled ids and their log-probs are taken from there, and
            nothing else.
        folder: made here.

    Returns:
        The HF folder of the result.

    Raises:
        AssertionError: a log-prob is not that of the weights that this loop has at the step.
    """
    tokenizer = Tokenizer.load(spec.model.path)
    prompts = load_prompts(spec.data, spec.data.train_files, tokenizer).prompts
    truths = {prompt.row_id: prompt.ground_truth for prompt in prompts}
    rank = TrainerRank(RankConfig.from_spec(spec, "cpu"))
    reference = ReferenceModel(spec.model.path, attn_implementation=spec.model.attn_implementation)
    tau = spec.rollout.temperature
    for path in sorted(rollouts.glob("step_*.parquet")):
        batch: dict[str, list[Sample]] = {}
        for row in pq.read_table(path).to_pylist():
            ids = np.array(row["response_ids"], np.int32)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            sample = Sample(
                row["sample_id"], row["group_id"], "0" * 32, np.array(row["prompt_ids"], np.int32), ids,
                np.array(row["logprobs"], np.float32), np.ones(len(ids), np.uint8), [VersionSpan("", 0, len(ids))],
                row["finish_reason"], reward=score(text, truths[row["row_id"]]),
            )  # fmt: skip
            batch.setdefault(sample.group_id, []).append(sample)
        groups = [batch[name] for name in sorted(batch)]
        asked = [
            {"id": s.sample_id, "prompt_ids": s.prompt_ids, "response_ids": s.response_ids, "temperature": tau}
            for group in groups
            for s in group
        ]
        held = {result["id"]: result["logprobs"] for result in rank.log_probs(asked)}
        anchored = {result["id"]: result["logprobs"] for result in reference.score(asked)}
        for group in groups:
            rewards = np.array([sample.reward for sample in group])
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + spec.algorithm.epsilon)
            for sample, advantage in zip(group, advantages, strict=True):
                np.testing.assert_allclose(sample.logprobs, held[sample.sample_id], atol=1e-3)
                sample.advantages = np.full(len(sample.response_ids), advantage, np.float32)
                sample.ref_logprobs = anchored[sample.sample_id]
        loss = LossSpec(kl_coef=spec.algorithm.kl_coef, temperature=tau)
        rank.update([sample for group in groups for sample in group], loss, spec.trainer.learning_rate)
    rank.export(folder / "export")
    return folder / "export"


def train(spec: JobSpec, folder: Path) -> Path:
    """Makes ``trainer.total_steps`` steps of a GRPO job; returns the HF folder of the result."""
    store = folder / "store"
    store.mkdir(parents=True)
    tokenizer = Tokenizer.load(spec.model.path)
    tau = spec.rollout.temperature
    prompts = load_prompts(spec.data, spec.data.train_files, tokenizer).prompts
    cursor = Cursor(len(prompts), spec.trainer.seed, spec.data.shuffle)
    rank = TrainerRank(RankConfig.from_spec(spec, "cpu"))
    reference = ReferenceModel(spec.model.path, attn_implementation=spec.model.attn_implementation)
    server = VllmServer(spec, store=store, log_path=folder / "rollout.log", cores=[0])
    server.start()
    http = httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, timeout=120, trust_env=False
    )
    http.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()

    def push(step: int) -> None:
        http.post("/pause?mode=keep").raise_for_status()
        http.post("/start_weight_update").raise_for_status()
        http.post("/update_weights", json={"update_info": {"path": rank.publish(store).name}}).raise_for_status()
        http.post("/finish_weight_update", json={"weight_version": str(step)}).raise_for_status()
        http.post("/resume").raise_for_status()

    def draw(index: int, slot: int, row: int) -> Sample:
        seed = hashlib.blake2b(f"{spec.trainer.seed}/{index}/{slot}".encode(), digest_size=4).digest()
        sampling = {
            "max_tokens": spec.rollout.max_response_length,
            "temperature": tau,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": sorted(tokenizer.eos_ids),
            "seed": int.from_bytes(seed, "big") & 0x7FFFFFFF,
        }
        body = {"token_ids": prompts[row].prompt_ids.tolist(), "sampling_params": sampling}
        choice = http.post("/inference/v1/generate", json=body).raise_for_status().json()["choices"][0]
        ids = np.array(choice["token_ids"], np.int32)
        logprobs = np.minimum(np.array([t["logprob"] for t in choice["logprobs"]["content"]], np.float32), 0)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return Sample(
            f"{index}.{slot}", str(index), "0" * 32, prompts[row].prompt_ids, ids, logprobs,
            np.ones(len(ids), np.uint8), [VersionSpan("", 0, len(ids))], choice["finish_reason"],
            reward=score(text, prompts[row].ground_truth),
        )  # fmt: skip

    try:
        push(0)
        for step in range(spec.trainer.total_steps or 0):
            groups = []
            for index in range(step * spec.rollout.batch_size, (step + 1) * spec.rollout.batch_size):
                row = cursor.next()[1]
                groups.append([(index, slot, row) for slot in range(spec.rollout.n)])
            with ThreadPoolExecutor(64) as pool:
                batch = list(pool.map(lambda one: draw(*one), [one for group in groups for one in group]))
            for at in range(0, len(batch), spec.rollout.n):
                group = batch[at : at + spec.rollout.n]
                rewards = np.array([sample.reward for sample in group])
                advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + spec.algorithm.epsilon)
                asked = [
                    {"id": s.sample_id, "prompt_ids": s.prompt_ids, "response_ids": s.response_ids, "temperature": tau}
                    for s in group
                ]
                results = reference.score(asked)
                for sample, advantage, result in zip(group, advantages, results, strict=True):
                    sample.advantages = np.full(len(sample.response_ids), advantage, np.float32)
                    sample.ref_logprobs = result["logprobs"]
            rank.update(batch, LossSpec(kl_coef=spec.algorithm.kl_coef, temperature=tau), spec.trainer.learning_rate)
            push(step + 1)
        rank.export(folder / "export")
    finally:
        http.close()
        server.stop()
    return folder / "export"
