"""Does each algorithm learn, and what does stale data cost? Ten seeds of a model of a million parameters.

Run from the repository's folder: ``python -m tests.bench.bench_learning --seeds 10 --jobs 16 --out DIR``. It needs
torch, numpy and the job file's pydantic, no network, and one core for each of ``--jobs``. Runs that have ended are kept
in ``DIR/runs.jsonl``: a further call makes those that are missing, and prints the tables of all.

The loop is plain torch in one process: sampling, one optimiser step a batch, sampling again. Advantages, losses, their
aggregation and the value loss are the product's own; vLLM, Ray and DeepSpeed take no part. Each seed begins from its
own model, warmed up on a few right answers, so that all algorithms of a seed start from the same weights.

What is expected was written down before the runs: TARGET, CONTROL_LIMIT, EQUIVALENCE.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import json
import multiprocessing
import platform
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nightshift.algorithms import REGISTRY, compute_advantages
from nightshift.algorithms.batch import has_spread
from nightshift.algorithms.rewards import overlong_penalty
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.experience import FINISH_LENGTH, FINISH_STOP, LossSpec, Sample, VersionSpan
from services.trainer.aggregate import divisor, token_weights, weighted_sum
from services.trainer.losses import LossInputs, policy_loss, value_loss
from services.trainer.preference import preference_loss
from tests.bench import small_task
from tests.bench.learning_tables import learning_table, staleness_table
from tests.bench.small_task import END, MAX_RESPONSE, Problem, Small

#: Held-out accuracy that each algorithm reaches in the mean over the seeds, within STEPS x PROMPTS x N samples.
TARGET = 0.45
#: Gain over the warmed-up model that the control with the sign turned stays below.
CONTROL_LIMIT = 0.0
#: Decoupled PPO at eta 4 counts as equivalent to eta 0 where the 90% interval of the mean difference lies within this.
EQUIVALENCE = 0.05

WARM_STEPS = 60
STEPS, PROMPTS, N = 40, 8, 8
TEMPERATURE, LEARNING_RATE, CRITIC_RATE = 1.0, 3e-4, 1e-3
STALENESS_RATE = 6e-4  # higher, so that eta versions are far apart
ETAS = (0, 1, 4, 8)
RUNS = "runs.jsonl"


@dataclass(frozen=True, slots=True)
class Method:
    """One algorithm.

    Attributes:
        algorithm: section ``algorithm`` of a job.
        sign: -1 turns the advantages round, for the control.
        eta: age of the sampling weights in steps.
        rate: learning rate.
    """

    algorithm: dict[str, Any] = field(default_factory=dict)
    sign: float = 1.0
    eta: int = 0
    rate: float = LEARNING_RATE


_GROUP: dict[str, Any] = {"clip_high": 0.2}
METHODS: dict[str, Method] = {
    "grpo": Method({"estimator": "grpo"}),
    "rloo": Method({"estimator": "rloo"}),
    "reinforce_plus_plus": Method({"estimator": "reinforce_plus_plus"}),
    "dr_grpo": Method({"estimator": "dr_grpo", "loss_aggregation": "constant_length"}),
    "dapo": Method({"estimator": "grpo", "clip_high": 0.28, "filter_zero_spread": True, "overlong_buffer": 2}),
    "gspo": Method({"estimator": "grpo", "policy_loss": "gspo", "loss_aggregation": "seq_mean_token_mean"}),
    "cispo": Method({"estimator": "grpo", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.28}),
    "ppo_gae": Method({"estimator": "gae", "gae_lambda": 1.0, "whiten_advantages": True}),
    "ppo_vtrace": Method(
        {"estimator": "vtrace", "gae_lambda": 1.0, "whiten_advantages": True, "policy_loss": "ppo_clip_proximal"}
    ),
    "control_sign_turned": Method({"estimator": "grpo"}, sign=-1.0),
}
_STALE: dict[str, dict[str, Any]] = {
    "plain": {"estimator": "grpo", "policy_loss": "ppo_clip"},
    "decoupled": {"estimator": "grpo", "policy_loss": "decoupled_ppo"},
    "truncated": {"estimator": "grpo", "policy_loss": "ppo_clip_proximal", "importance_cap": 2.0},
    "vtrace": {
        "estimator": "vtrace",
        "gae_lambda": 1.0,
        "whiten_advantages": True,
        "policy_loss": "ppo_clip_proximal",
    },
}
STALE_METHODS: dict[str, Method] = {
    f"{name}@{eta}": Method(algorithm, eta=eta, rate=STALENESS_RATE)
    for name, algorithm in _STALE.items()
    for eta in ETAS
}


#: What each method is to reach: the least accuracy, and for the control the most that it may gain.
EXPECTED = {name: ("gain <=", CONTROL_LIMIT) if method.sign < 0 else (">=", TARGET) for name, method in METHODS.items()}


class Learner:
    """The loop of one method and one seed.

    Args:
        model: the warmed-up policy; changed in place.
        seed: of the prompts and the samples.
    """

    def __init__(self, model: Small, method: Method, seed: int) -> None:
        self.model, self.method = model, method
        self.config = AlgorithmConfig.model_validate(method.algorithm)
        self.samples_drawn = 0
        self._rng = np.random.default_rng((seed, 2))
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=method.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._past: deque[dict[str, Tensor]] = deque(maxlen=method.eta + 1)
        self._sampler = copy.deepcopy(model)
        self._critic: Small | None = None
        if REGISTRY[self.config.estimator].needs_values:
            torch.manual_seed(seed)
            self._critic = Small(outputs=1)
            body = {name: value for name, value in model.state_dict().items() if not name.startswith("head")}
            self._critic.load_state_dict(body, strict=False)
            torch.nn.init.zeros_(self._critic.head.weight)
            torch.nn.init.zeros_(self._critic.head.bias)
            self._values = torch.optim.AdamW(self._critic.parameters(), lr=CRITIC_RATE, weight_decay=0.0)

    def step(self) -> dict[str, float]:
        """Draws a batch, by weights that are ``eta`` steps old, and makes one optimiser step."""
        self._past.append({name: value.clone() for name, value in self.model.state_dict().items()})
        self._sampler.load_state_dict(self._past[0])
        batch = self._draw()
        prompts = [sample.prompt_ids.astype(np.int64) for sample in batch]
        responses = [sample.response_ids.astype(np.int64) for sample in batch]
        old_values: list[np.ndarray] | None = None
        target = None
        sizes = [len(response) for response in responses]
        if self._critic is not None:
            with torch.no_grad():
                found = small_task.response_outputs(self._critic, prompts, responses)[:, 0]
            old_values = [part.numpy() for part in found.split(sizes)]
        if REGISTRY[self.config.estimator].needs_target:
            with torch.no_grad():
                current = small_task.token_logprobs(self.model, prompts, responses, TEMPERATURE)
            target = [part.numpy() for part in current.split(sizes)]
        report = compute_advantages(batch, self.config, values=old_values, target_logprobs=target)
        spec = self._spec(batch)
        inputs, weights, mask = self._inputs(batch, prompts, responses)
        outputs = policy_loss(inputs, spec)
        total = divisor(spec.aggregation, spec.total_tokens, spec.total_sequences, spec.constant_length)
        self._apply(self.model, self._optimizer, weighted_sum(outputs.losses, mask, weights) / total)
        if self._critic is not None:
            self._learn_values(batch, prompts, responses, mask, old_values or [])
        return {"reward": report.mean_reward, "zero_spread": report.zero_spread_share}

    def _draw(self) -> list[Sample]:
        """PROMPTS groups; with dynamic sampling those without a signal are drawn anew, a few times."""
        kept: list[Sample] = []
        groups = 0
        for _ in range(6):
            picked = small_task.problems(PROMPTS - groups, self._rng)
            for group in self._groups(picked, groups):
                rewards = np.array([s.reward_parts["right"] for s in group], np.float64)
                if not self.config.filter_zero_spread or has_spread(rewards):
                    kept += group
                    groups += 1
            if groups == PROMPTS:
                break
        if not kept:
            kept = [sample for group in self._groups(small_task.problems(PROMPTS, self._rng), 0) for sample in group]
        return kept

    def _groups(self, picked: list[Problem], first: int) -> list[list[Sample]]:
        asked = [problem for problem in picked for _ in range(N)]
        responses, logprobs = small_task.sample(self._sampler, [p.prompt for p in asked], TEMPERATURE, self._generator)
        self.samples_drawn += len(asked)
        samples = []
        for at, (problem, response, values) in enumerate(zip(asked, responses, logprobs, strict=True)):
            right = small_task.reward(problem, response)
            penalty = 0.0
            if self.config.overlong_buffer is not None:
                penalty = overlong_penalty(len(response), MAX_RESPONSE, self.config.overlong_buffer)
            samples.append(
                Sample(
                    sample_id=f"g{first + at // N}.{at % N}",
                    group_id=f"g{first + at // N}",
                    trace_id="0" * 32,
                    prompt_ids=problem.prompt.astype(np.int32),
                    response_ids=response.astype(np.int32),
                    logprobs=np.minimum(values, 0.0),
                    loss_mask=np.ones(len(response), np.uint8),
                    versions=[VersionSpan("bench/0/0", 0, len(response))],
                    finish_reason=FINISH_STOP if response[-1] == END else FINISH_LENGTH,
                    reward=right + penalty,
                    reward_parts={"right": right},
                )
            )
        return [samples[at : at + N] for at in range(0, len(samples), N)]

    def _spec(self, batch: list[Sample]) -> LossSpec:
        return LossSpec(
            policy_loss=self.config.policy_loss,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            aggregation=self.config.loss_aggregation,
            total_tokens=sum(sample.trained_tokens for sample in batch),
            total_sequences=len(batch),
            constant_length=MAX_RESPONSE,
            options=self.config.loss_options,
        )

    def _inputs(
        self, batch: list[Sample], prompts: list[np.ndarray], responses: list[np.ndarray]
    ) -> tuple[LossInputs, Tensor, Tensor]:
        masks = [sample.loss_mask for sample in batch]
        advantages = np.concatenate([s.advantages for s in batch if s.advantages is not None]) * self.method.sign
        mask = torch.from_numpy(np.concatenate(masks)) > 0
        inputs = LossInputs(
            logprobs=small_task.token_logprobs(self.model, prompts, responses, TEMPERATURE),
            behaviour=torch.from_numpy(np.concatenate([sample.logprobs for sample in batch])),
            advantages=torch.from_numpy(advantages.astype(np.float32)),
            mask=mask,
            sequence=torch.from_numpy(np.repeat(np.arange(len(batch)), [len(r) for r in responses])),
            sequences=len(batch),
        )
        return inputs, torch.from_numpy(token_weights(masks, self.config.loss_aggregation)), mask

    def _learn_values(
        self,
        batch: list[Sample],
        prompts: list[np.ndarray],
        responses: list[np.ndarray],
        mask: Tensor,
        old: list[np.ndarray],
    ) -> None:
        assert self._critic is not None
        returns = torch.from_numpy(np.concatenate([s.returns for s in batch if s.returns is not None]))
        values = small_task.response_outputs(self._critic, prompts, responses)[:, 0]
        outputs = value_loss(values, torch.from_numpy(np.concatenate(old)), returns, 0.2)
        loss = outputs.losses.masked_fill(~mask, 0.0).sum() / mask.sum()
        self._apply(self._critic, self._values, loss)

    @staticmethod
    def _apply(model: Small, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def held_out() -> list[Problem]:
    """The problems on which accuracy is measured: the same for all runs."""
    return small_task.problems(256, np.random.default_rng(12345))


def warmed(seed: int, out: Path) -> Small:
    """The seed's warmed-up model, made once and kept in ``out``."""
    path = out / f"warm_{seed}.npz"
    if not path.is_file():
        model = small_task.warm_up(seed, WARM_STEPS)
        part = path.with_suffix(".part.npz")
        np.savez(part, **{name: value.numpy() for name, value in model.state_dict().items()})
        part.replace(path)
    model = Small()
    with np.load(path, allow_pickle=False) as values:
        model.load_state_dict({name: torch.from_numpy(values[name]) for name in values.files})
    return model


def learn(name: str, seed: int, out: Path, steps: int) -> dict[str, Any]:
    """One curve: accuracy before, on the way, and after."""
    torch.set_num_threads(1)
    method = METHODS.get(name) or STALE_METHODS[name]
    model = warmed(seed, out)
    learner, problems = Learner(model, method, seed), held_out()
    began = time.monotonic()
    curve = [small_task.accuracy(model, problems)]
    for step in range(1, steps + 1):
        learner.step()
        if step % max(1, steps // 4) == 0:
            curve.append(small_task.accuracy(model, problems))
    return {
        "method": name,
        "seed": seed,
        "curve": curve,
        "samples": learner.samples_drawn,
        "seconds": time.monotonic() - began,
    }


def prefer(seed: int, out: Path, steps: int) -> dict[str, Any]:
    """DPO on pairs of the best and the worst answer that the warmed-up model drew itself."""
    torch.set_num_threads(1)
    model, rng = warmed(seed, out), np.random.default_rng((seed, 3))
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    while len(prompts) < 2 * 128:
        picked = [p for p in small_task.problems(32, rng) for _ in range(N)]
        drawn, _ = small_task.sample(model, [p.prompt for p in picked], TEMPERATURE, generator)
        for at in range(0, len(picked), N):
            group = sorted(drawn[at : at + N], key=lambda r: small_task.reward(picked[at], r))
            if small_task.reward(picked[at], group[-1]) > small_task.reward(picked[at], group[0]):
                prompts += [picked[at].prompt] * 2
                responses += [group[-1], group[0]]
    spec = LossSpec(policy_loss="dpo", aggregation="seq_mean_token_sum", options={"beta": 0.1})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    before = small_task.accuracy(model, held_out())
    with torch.no_grad():
        reference = small_task.token_logprobs(model, prompts, responses, 1.0)
    on = torch.ones(len(reference), dtype=torch.bool)
    sequence = torch.from_numpy(np.repeat(np.arange(len(responses)), [len(r) for r in responses]))
    losses, margins = [], []
    for _ in range(steps):
        logprobs = small_task.token_logprobs(model, prompts, responses, 1.0)
        inputs = LossInputs(logprobs, reference, torch.zeros_like(reference), on, None, sequence, len(responses))
        outputs = preference_loss(inputs, reference, spec)
        loss = outputs.losses.sum() / len(responses)
        losses.append(float(loss.detach()))
        margins.append(float(outputs.sums["chosen"] - outputs.sums["rejected"]) / (len(responses) / 2))
        Learner._apply(model, optimizer, loss)
    return {
        "seed": seed,
        "loss": [losses[0], losses[-1]],
        "margin": [margins[0], margins[-1]],
        "accuracy": [before, small_task.accuracy(model, held_out())],
    }


def distil(seed: int, out: Path, steps: int) -> dict[str, Any]:
    """From the policy that GRPO trained into the warmed-up one: the share of the gap in accuracy that closes."""
    torch.set_num_threads(1)
    teacher = warmed(seed, out)
    trainer = Learner(teacher, METHODS["grpo"], seed)
    for _ in range(steps):
        trainer.step()
    student = warmed(seed, out)
    learner = Learner(student, Method({"estimator": "grpo"}), seed + 1000)
    config = AlgorithmConfig(estimator="distillation")
    problems = held_out()
    before, goal = small_task.accuracy(student, problems), small_task.accuracy(teacher, problems)
    for _ in range(steps):
        learner._sampler.load_state_dict(student.state_dict())
        batch = learner._draw()
        prompts = [sample.prompt_ids.astype(np.int64) for sample in batch]
        responses = [sample.response_ids.astype(np.int64) for sample in batch]
        with torch.no_grad():
            taught = small_task.token_logprobs(teacher, prompts, responses, TEMPERATURE)
        for sample, part in zip(batch, taught.split([len(r) for r in responses]), strict=True):
            sample.teacher_logprobs = part.numpy()
        compute_advantages(batch, config)
        spec = learner._spec(batch)
        inputs, weights, mask = learner._inputs(batch, prompts, responses)
        loss = weighted_sum(policy_loss(inputs, spec).losses, mask, weights) / spec.total_tokens
        Learner._apply(student, learner._optimizer, loss)
    after = small_task.accuracy(student, problems)
    return {"seed": seed, "before": before, "after": after, "teacher": goal}


def read_runs(out: Path, steps: int) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Runs that have ended, of this number of steps, by kind, method and seed."""
    path = out / RUNS
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {(run["kind"], run.get("method", ""), run["seed"]): run for run in lines if run["steps"] == steps}


def _key(kind: str, work: tuple[Any, ...]) -> tuple[str, str, int]:
    return (kind, work[0], work[1]) if kind == "curves" else (kind, "", work[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--parts", nargs="+", default=["learning", "others"], choices=["learning", "others", "stale"])
    parser.add_argument("--only", nargs="*", help="methods; left out: all of the chosen parts")
    parser.add_argument("--limit-s", type=float, default=380.0, help="runs not begun by then are left out, and counted")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    seeds = range(arguments.seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        list(pool.map(_warm, [(seed, out) for seed in seeds]))
        jobs: list[tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]] = []
        names = [
            *(METHODS if "learning" in arguments.parts else ()),
            *(STALE_METHODS if "stale" in arguments.parts else ()),
        ]
        for seed in seeds:  # seed by seed, so that a run that is cut short holds whole seeds
            jobs += [
                ("curves", learn, (name, seed, out, arguments.steps))
                for name in names
                if not arguments.only or name in arguments.only
            ]
            if "others" in arguments.parts and not arguments.only:
                jobs += [("dpo", prefer, (seed, out, 60)), ("distillation", distil, (seed, out, arguments.steps))]
        deadline = began + arguments.limit_s
        done = read_runs(out, arguments.steps)
        futures = [
            (kind, pool.submit(_within, deadline, function, work))
            for kind, function, work in jobs
            if _key(kind, work) not in done
        ]
        left_out = 0
        with (out / RUNS).open("a") as file:
            for kind, future in futures:
                result = future.result()
                if result is None:
                    left_out += 1
                    continue
                file.write(json.dumps({"kind": kind, "steps": arguments.steps, **result}) + "\n")
                file.flush()
    found: dict[str, list[dict[str, Any]]] = {"curves": [], "dpo": [], "distillation": []}
    for run in read_runs(out, arguments.steps).values():
        found[run["kind"]].append(run)
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {arguments.jobs} jobs",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": time.monotonic() - began,
        "parameters": sum(p.numel() for p in Small().parameters()),
        "settings": {"steps": arguments.steps, "prompts": PROMPTS, "n": N, "warm_steps": WARM_STEPS},
        "left_out": left_out,
        **found,
    }
    (out / "learning.json").write_text(json.dumps(report))
    print(f"{report['machine']}, torch {report['torch']}, {report['date']}, {report['seconds']:.0f} s")
    print(f"{report['parameters']} parameters, {arguments.seeds} seeds, {left_out} runs left out for want of time\n")
    stale = staleness_table(found["curves"], ETAS, EQUIVALENCE)
    print("\n".join([*learning_table(found["curves"], EXPECTED), "", *stale]))
    if found["dpo"]:
        last = [r["loss"][1] for r in found["dpo"]]
        margins = [r["margin"][1] for r in found["dpo"]]
        print(f"\ndpo: loss {np.mean([r['loss'][0] for r in found['dpo']]):.3f} -> {np.mean(last):.3f}", end="")
        print(f" (highest {max(last):.3f}), margin -> {np.mean(margins):.3f} (lowest {min(margins):.3f})")
    if found["distillation"]:
        gaps = [(r["after"] - r["before"]) / (r["teacher"] - r["before"]) for r in found["distillation"]]
        print(f"distillation: share of the gap closed {np.mean(gaps):.2f} (lowest {min(gaps):.2f})")


def _warm(work: tuple[int, Path]) -> None:
    torch.set_num_threads(1)
    warmed(*work)


def _within(deadline: float, function: Callable[..., dict[str, Any]], work: tuple[Any, ...]) -> dict[str, Any] | None:
    """Runs the work unless the time is over; monotonic clocks of one machine agree between processes."""
    return function(*work) if time.monotonic() < deadline else None


if __name__ == "__main__":
    main()
