"""One rank in this process: the real DeepSpeed on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer

from nightshift.wire.experience import LossSpec, Sample, VersionSpan
from services.trainer.aggregate import AGGREGATIONS, divisor, token_weights, weighted_sum
from services.trainer.batching import micro_batches, pad
from services.trainer.checks import NonFiniteGradientError
from services.trainer.config import RankConfig
from services.trainer.links import Links
from services.trainer.losses import LossInputs, policy_loss
from services.trainer.nccl import UNIQUE_ID_BYTES
from services.trainer.policy import load_policy, to_device
from services.trainer.rank import TrainerRank
from services.trainer.store import published
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.integration

Make = Callable[..., TrainerRank]
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model: Path) -> Make:
    # With Adam's usual epsilon the first step is the gradient's sign, which makes rounding errors of it large.
    def build(**settings: Any) -> TrainerRank:
        return TrainerRank(RankConfig(**{"model_path": str(model), "adam_epsilon": 1e-2, **settings}))

    return build


def batch(count: int = 8, prompts: int = 3, seed: int = 0) -> list[Sample]:
    """Samples of a few prompts, some of them partly masked."""
    rng = np.random.default_rng(seed)
    asked = [rng.integers(5, 120, int(rng.integers(3, 12))).astype(np.int32) for _ in range(prompts)]
    samples = []
    for index in range(count):
        tokens = int(rng.integers(1, 9))
        mask = np.ones(tokens, np.uint8)
        mask[1:2] = index % 2
        samples.append(
            Sample(
                sample_id=f"g{index * prompts // count}.{index}",
                group_id=f"g{index * prompts // count}",
                trace_id="0" * 31 + "1",
                prompt_ids=asked[index * prompts // count],
                response_ids=rng.integers(5, 120, tokens).astype(np.int32),
                logprobs=(-4 - rng.random(tokens)).astype(np.float32),
                loss_mask=mask,
                versions=[VersionSpan("r/0/0", 0, tokens)],
                finish_reason="stop",
                reward=0.0,
                advantages=rng.normal(size=tokens).astype(np.float32),
                ref_logprobs=(-4 - rng.random(tokens)).astype(np.float32),
            )
        )
    return samples


def weights(rank: TrainerRank) -> Tensor:
    """All weights as one vector."""
    tensors = rank._gathered("float32")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).clone()


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_o14_one_step_is_the_same_for_every_micro_batch_size(make: Make, aggregation: str) -> None:
    spec = LossSpec(aggregation=aggregation, constant_length=20, kl_coef=0.1, entropy_coef=0.01)
    results = []
    for size in (8, 1, 2, 4):
        rank = make(micro_batch_size=size, max_grad_norm=1e9)
        metrics = rank.update(batch(), spec, 1e-2)
        results.append((metrics["grad_norm"], metrics["loss/actor"], weights(rank)))
    norm, loss, whole = results[0]
    for other_norm, other_loss, other in results[1:]:
        assert other_norm == pytest.approx(norm, rel=1e-5)
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert distance(other, whole) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_o14_parts_whose_totals_come_at_the_end_give_the_whole_batch_s_step(make: Make, stage: int) -> None:
    samples, spec = batch(), LossSpec(kl_coef=0.1)
    whole = make(zero_stage=stage)
    parts = make(zero_stage=stage)
    for step in range(3):
        wanted = whole.update(samples, spec, 1e-2)
        if step:
            parts.accumulate(samples[:5], spec)
            parts.discard()
        for part in (samples[:3], samples[3:]):
            parts.accumulate(part, spec)
        got = parts.apply(float(sum(sample.trained_tokens for sample in samples)), 1e-2)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert distance(weights(whole), weights(parts)) < 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_o14_a_streamed_update_is_the_whole_one(make: Make, aggregation: str) -> None:
    samples = batch()
    spec = LossSpec(aggregation=aggregation, constant_length=20, kl_coef=0.1, entropy_coef=0.01)
    tokens, sequences = sum(sample.trained_tokens for sample in samples), len(samples)
    whole, streamed = make(max_grad_norm=0.1), make(max_grad_norm=0.1)
    for _ in range(3):
        wanted = whole.update(samples, spec, 1e-2)
        for part in (samples[:1], samples[1:3], samples[3:]):
            streamed.accumulate(part, spec)
        got = streamed.apply(divisor(aggregation, tokens, sequences, spec.constant_length), 1e-2)
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert distance(weights(whole), weights(streamed)) < 1e-6


def test_all_zero_stages_make_the_same_steps(make: Make) -> None:
    norms, ends = [], []
    for stage in STAGES:
        rank = make(zero_stage=stage)
        norms.append([rank.update(batch(), LossSpec(), 1e-2)["grad_norm"] for _ in range(3)])
        ends.append(weights(rank))
    for other, end in zip(norms[1:], ends[1:], strict=True):
        assert other == pytest.approx(norms[0], rel=1e-5)
        assert distance(end, ends[0]) < 1e-6


def plain_loop(
    config: RankConfig, samples: list[Sample], spec: LossSpec, rates: list[float]
) -> tuple[Tensor, list[float]]:
    """The same training without DeepSpeed: a torch AdamW, gradients summed over micro-batches, one clip."""
    policy = load_policy(config)
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=0.0, betas=(config.beta1, config.beta2), eps=config.adam_epsilon, weight_decay=0.0, fused=True
    )
    total = float(sum(sample.trained_tokens for sample in samples))
    norms = []
    for rate in rates:
        for micro in micro_batches(samples, config.micro_batch_size):
            rows = pad([(sample.prompt_ids, sample.response_ids) for sample in micro], share=True)
            ones = torch.ones(len(rows.targets))
            logprobs, _ = policy(temperature=ones, **to_device(rows, torch.device("cpu")))
            masks = [sample.loss_mask for sample in micro]
            behaviour, advantages = (
                torch.tensor(np.concatenate([getattr(sample, name) for sample in micro]))
                for name in ("logprobs", "advantages")
            )
            inputs = LossInputs(logprobs, behaviour, advantages, torch.tensor(np.concatenate(masks)) > 0)
            outputs = policy_loss(inputs, spec)
            weight = torch.tensor(token_weights(masks, spec.aggregation))
            (weighted_sum(outputs.losses, inputs.mask, weight) / total).backward()
        norm = torch.stack([torch.linalg.vector_norm(p.grad.double()) for p in parameters]).pow(2).sum().sqrt()
        scale = 1.0 / max(1.0, (float(norm) + 1e-6) / config.max_grad_norm)
        for parameter in parameters:
            parameter.grad.mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(norm))
    state = {name: p.detach() for name, p in policy.model.named_parameters()}
    return torch.cat([state[name].flatten() for name in sorted(state)]), norms


@pytest.mark.parametrize("stage", [0, 2])
def test_steps_are_bit_identical_to_a_plain_torch_loop_while_nothing_is_clipped(make: Make, stage: int) -> None:
    samples, spec, rates = batch(), LossSpec(), [1e-2, 2e-2, 1e-2]
    rank = make(zero_stage=stage, max_grad_norm=1e9)
    start = weights(rank)
    norms = [rank.update(samples, spec, rate)["grad_norm"] for rate in rates]
    end, plain_norms = plain_loop(rank.config, samples, spec, rates)
    assert norms == pytest.approx(plain_norms, rel=1e-6)
    assert not torch.equal(end, start)
    assert torch.equal(weights(rank), end)


def test_clipped_steps_equal_a_plain_torch_loop(make: Make) -> None:
    samples, spec, rates = batch(), LossSpec(), [1e-2] * 3
    rank = make(max_grad_norm=0.01)
    for rate in rates:
        assert rank.update(samples, spec, rate)["grad_norm"] > 0.01
    assert distance(weights(rank), plain_loop(rank.config, samples, spec, rates)[0]) < 1e-6


def test_two_runs_are_bit_identical(make: Make) -> None:
    """In the second, the loss of each batch is read before its step, and of another one that is never stepped on."""
    ends, spec = [], LossSpec(kl_coef=0.1)
    for reads in (False, True):
        rank = make()
        for seed in range(3):
            samples = batch(seed=seed)
            if reads:
                rank.evaluate(batch(seed=99), spec)
                sums = rank.evaluate(samples, spec)
            metrics = rank.update(samples, spec, 1e-2)
            if reads:
                assert sums.loss / sums.tokens == pytest.approx(metrics["loss/actor"], rel=1e-6)
                assert (sums.tokens, sums.kl / sums.tokens) == (metrics["tokens"], pytest.approx(metrics["kl"]))
        ends.append(weights(rank))
    assert torch.equal(ends[0], ends[1])


def test_sharing_prompts_changes_the_work_and_not_the_step(make: Make) -> None:
    shared, alone = make(micro_batch_size=8), make(micro_batch_size=8, share_prompts=False)
    metrics = [rank.update(batch(), LossSpec(), 1e-2) for rank in (shared, alone)]
    assert metrics[0]["positions"] < metrics[1]["positions"]
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-5)
    assert distance(weights(shared), weights(alone)) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_packed_rows_change_the_work_and_not_the_step(make: Make, stage: int) -> None:
    spec = LossSpec(kl_coef=0.1, entropy_coef=0.01)
    items: list[Any] = [
        {"id": s.sample_id, "prompt_ids": s.prompt_ids, "response_ids": s.response_ids} for s in batch()
    ]
    settings = {"zero_stage": stage, "share_prompts": False}
    padded = make(micro_batch_size=8, **settings)
    wanted = [padded.update(batch(seed=seed), spec, 1e-2) for seed in range(3)]
    for limits in (
        {"micro_batch_size": 8},
        {"micro_batch_size": 3},
        {"max_tokens": 40, "gradient_checkpointing": True},
    ):
        packed = make(padding_free=True, **settings, **limits)
        for seed, want in enumerate(wanted):
            got = packed.update(batch(seed=seed), spec, 1e-2)
            assert got["positions"] == sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in batch(seed=seed))
            assert got["positions"] < want["positions"]
            assert {name: got[name] for name in ("grad_norm", "loss/actor", "kl", "entropy")} == pytest.approx(
                {name: want[name] for name in ("grad_norm", "loss/actor", "kl", "entropy")}, rel=1e-4, abs=1e-6
            )
        assert distance(weights(packed), weights(padded)) < 1e-5
        for one, other in zip(packed.log_probs(items), padded.log_probs(items), strict=True):
            assert np.allclose(one["logprobs"], other["logprobs"], atol=1e-4)


def test_gradient_checkpointing_does_not_change_the_step(make: Make) -> None:
    results = []
    for checkpointing in (False, True):
        rank = make(gradient_checkpointing=checkpointing)
        rank.update(batch(), LossSpec(), 1e-2)
        results.append(weights(rank))
    assert distance(*results) < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_parameters_train(make: Make, stage: int) -> None:
    exact = make().update(batch(), LossSpec(), 1e-2)
    rank = make(dtype="bfloat16", zero_stage=stage)
    metrics = [rank.update(batch(), LossSpec(), 1e-2) for _ in range(3)]
    assert metrics[0]["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
    assert metrics[2]["loss/actor"] < metrics[0]["loss/actor"]


def test_autocast_trains_and_exact_log_probs_leave_it_out(make: Make) -> None:
    rank, plain = make(autocast=True), make()
    items: list[Any] = [
        {"id": s.sample_id, "prompt_ids": s.prompt_ids, "response_ids": s.response_ids} for s in batch()
    ]
    exact = [result["logprobs"] for result in rank.log_probs(items, exact=True)]
    for got, want in zip(exact, plain.log_probs(items), strict=True):
        assert (got == want["logprobs"]).all()
    assert any((a != b["logprobs"]).any() for a, b in zip(exact, rank.log_probs(items), strict=True))
    assert math.isfinite(rank.update(batch(), LossSpec(), 1e-2)["grad_norm"])


@pytest.mark.parametrize("packed", [False, True])
def test_layers_are_compiled_at_the_start_and_leave_no_trace_in_the_step(
    make: Make, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The backend that traces and generates no code; the number of graphs is the same.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    graphs = counters["stats"]
    settings = {"padding_free": packed, "share_prompts": False, "zero_stage": 2}
    plain, before = make(**settings), graphs["unique_graphs"]
    compiled, found = make(compile=True, **settings), graphs["unique_graphs"]
    assert found > before
    for seed in range(3):
        wanted, got = (rank.update(batch(seed=seed), LossSpec(), 1e-2) for rank in (plain, compiled))
        assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert graphs["unique_graphs"] == found, "an update waited for the compiler"
    assert distance(weights(plain), weights(compiled)) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_o34_a_batch_without_trained_tokens_changes_nothing(make: Make, stage: int) -> None:
    rank, control = make(zero_stage=stage, weight_decay=0.1), make(zero_stage=stage, weight_decay=0.1)
    for one in (rank, control):
        one.update(batch(), LossSpec(), 1e-2)
    before = weights(rank)
    masked = batch(seed=1)
    for sample in masked:
        sample.loss_mask[:] = 0
    assert rank.update(masked, LossSpec(), 1e-2)["stepped"] == 0
    assert torch.equal(weights(rank), before)
    # Momentum and decay too: the next step is the one that would have come without it.
    for one in (rank, control):
        one.update(batch(seed=2), LossSpec(), 1e-2)
    assert torch.equal(weights(rank), weights(control))
    assert rank.optimizer_steps == control.optimizer_steps == 2


def test_o34_an_empty_response_leaves_the_others_alone(make: Make) -> None:
    empty = batch(1, 1, seed=3)[0]
    for name in ("response_ids", "logprobs", "loss_mask", "advantages", "ref_logprobs"):
        setattr(empty, name, getattr(empty, name)[:0])
    ranks = make(), make()
    ranks[0].update([*batch(), empty], LossSpec(), 1e-2)
    ranks[1].update(batch(), LossSpec(), 1e-2)
    assert torch.equal(weights(ranks[0]), weights(ranks[1]))


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_makes_no_step(make: Make, stage: int) -> None:
    rank = make(zero_stage=stage)
    before = weights(rank)
    wild = batch()
    for sample in wild:
        sample.advantages[:] = 3e38
        sample.logprobs[:] = -20
    with pytest.raises(NonFiniteGradientError):
        rank.update(wild, LossSpec(policy_loss="decoupled_ppo"), 1e-2)
    assert torch.equal(weights(rank), before)
    assert rank.optimizer_steps == 0
    assert math.isfinite(rank.update(batch(), LossSpec(), 1e-2)["grad_norm"])


def test_o32_on_policy_the_ratio_is_one_and_the_loss_is_minus_the_mean_advantage(make: Make, model: Path) -> None:
    temperature = 0.7
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    samples = batch()
    for sample in samples:
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids]))[None].long()
        with torch.no_grad():
            scaled = torch.log_softmax(reference(input_ids=ids).logits[0] / temperature, -1)
        places = range(len(sample.prompt_ids) - 1, ids.shape[1] - 1)
        sample.logprobs = np.array([scaled[p, ids[0, p + 1]].item() for p in places], np.float32)
    metrics = make().update(samples, LossSpec(temperature=temperature), 1e-6)
    assert metrics["log_ratio/abs_mean"] < 1e-5
    assert metrics["clip_fraction"] == 0
    kept = np.concatenate([sample.advantages[sample.loss_mask > 0] for sample in samples])
    assert metrics["loss/actor"] == pytest.approx(-kept.mean(), abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_o42_a_resumed_rank_goes_on_bit_by_bit(make: Make, tmp_path: Path, stage: int) -> None:
    rank = make(zero_stage=stage)
    for seed in range(2):
        rank.update(batch(seed=seed), LossSpec(), 1e-2)
    rank.save_state(tmp_path)
    resumed = make(zero_stage=stage)
    resumed.update(batch(seed=9), LossSpec(), 1e-2)
    resumed.accumulate(batch(seed=9), LossSpec())  # must leave no trace
    resumed.load_state(tmp_path)
    for one in (rank, resumed):
        for seed in range(2, 4):
            one.update(batch(seed=seed), LossSpec(), 1e-2)
    assert torch.equal(weights(rank), weights(resumed))
    assert rank.optimizer_steps == resumed.optimizer_steps == 4


@pytest.mark.parametrize("settings", [{"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 2, "dtype": "bfloat16"}])
def test_o41_the_export_is_the_trained_model(make: Make, model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    rank = make(**settings)
    rank.update(batch(), LossSpec(), 1e-2)
    folder = tmp_path / "export"
    rank.export(folder)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == dtype
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    sequence: Any = {"id": "a", "prompt_ids": np.array([1], np.int32), "response_ids": np.array([5, 6], np.int32)}
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([[1, 5, 6]])).logits.float()
    want = torch.log_softmax(logits, -1)[0, [0, 1], [5, 6]].numpy()
    assert rank.log_probs([sequence])[0]["logprobs"] == pytest.approx(
        want, abs=1e-6 if dtype == torch.float32 else 1e-3
    )
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not {path.suffix for path in folder.iterdir()} & {".bin", ".pt", ".pkl", ".pth"}
    assert AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(model).chat_template


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_publications_hold_every_weight_once_and_the_newest_two_stay(make: Make, tmp_path: Path, stage: int) -> None:
    rank = make(zero_stage=stage, rollout_dtype="bfloat16")
    first = rank.publish(tmp_path)
    assert first.changed_fraction == 1.0
    same = rank.publish(tmp_path)
    assert (same.changed_fraction, same.digest) == (0.0, first.digest)
    rank.update(batch(), LossSpec(), 1e-2)
    third = rank.publish(tmp_path)
    assert 0 < third.changed_fraction <= 1
    assert published(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.safetensors", "3.safetensors"]
    path = tmp_path / third.name
    assert third.digest == blake3(path.read_bytes()).hexdigest()
    assert third.bytes == path.stat().st_size
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    assert set(tensors) == {name for name, _ in rank.policy.model.named_parameters()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == rank.parameters


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_sent_over_a_link_is_what_was_published_whatever_came_after(
    make: Make, tmp_path: Path, stage: int
) -> None:
    """In the order and form in which vLLM's nccl engine receives it."""

    class Recorder:
        unique_id = bytes(UNIQUE_ID_BYTES)
        sent: list[Tensor]

        def join(self, timeout_s: float) -> None: ...
        def close(self) -> None: ...
        def send(self, tensors: Iterable[Tensor], timeout_s: float) -> None:
            self.sent = [tensor.clone() for tensor in tensors]
            assert all(tensor.is_contiguous() for tensor in tensors)

    rank = make(zero_stage=stage, weight_backend="nccl", rollout_dtype="bfloat16")
    link = Recorder()
    rank._links = Links(lambda server, world: link, "127.0.0.1")
    assert rank.links.open("rollout-0", 2, False)["world_size"] == 2
    made = rank.publish(tmp_path)
    assert made is not None
    assert made.backend == "nccl"
    rank.export(tmp_path / "published", "bfloat16")
    rank.update(batch(), LossSpec(), 1e-2)
    rank.send_weights("rollout-0", 30.0)
    expected = load_file(tmp_path / "published" / "model.safetensors")
    names = made.update_info["names"]
    assert [list(tensor.shape) for tensor in link.sent] == made.update_info["shapes"]
    assert set(made.update_info["dtype_names"]) == {"bfloat16"}
    assert set(names) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in zip(names, link.sent, strict=True))
    again = rank.publish(tmp_path)
    assert again is not None
    assert again.changed_fraction > 0.1


def test_an_update_lost_in_rounding_shows_in_the_changed_fraction(make: Make, tmp_path: Path) -> None:
    rank = make(rollout_dtype="bfloat16")
    rank.publish(tmp_path)
    rank.update(batch(), LossSpec(), 1e-6)
    assert rank.publish(tmp_path).changed_fraction < 0.5


def test_o47_fifty_updates_need_no_more_memory_than_ten(make: Make) -> None:
    rank, samples = make(micro_batch_size=16), batch(count=64, prompts=8)
    used = []
    for step in range(50):
        rank.update(samples, LossSpec(kl_coef=0.1), 1e-4)
        if step in (9, 49):
            status = Path("/proc/self/status").read_text().splitlines()
            used.append(next(int(line.split()[1]) for line in status if line.startswith("VmRSS")))
    early, late = used
    assert late <= 1.05 * early, f"{late / 2**10:.1f} MiB after {early / 2**10:.1f} MiB"
