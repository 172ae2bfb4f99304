"""Dynamic sampling, the critic and rewards by data source in the runner, against fakes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.wire import codec
from nightshift.wire.experience import LossSpec
from nightshift.wire.schedule import read_schedule
from nightshift.wire.v1 import trainer_pb2
from tests.fakes import policy
from tests.fakes.audit import balance
from tests.fakes.run import FakeRun
from tests.fakes.scorers import FakeScorers
from tests.fakes.trainer import AnsweringTrainer, FakeTrainer, Update

CRITIC = "critic"


class ValuedScorers(FakeScorers):
    """Also a critic: the value of a token is 0.5, and one more where the response was lengthened by a token."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Any] = []

    async def Score(self, request: Any, context: Any) -> Any:
        """Notes which weights a call names."""
        if dict(context.invocation_metadata()).get("application") == CRITIC:
            self.weights.append(codec.unpack(request.weights) if request.weights else None)
        return await super().Score(request, context)

    def _one(self, application: str, sample: dict[str, Any]) -> dict[str, Any]:
        if application != CRITIC:
            return super()._one(application, sample)
        values = np.full(len(sample["response_ids"]), 0.5, np.float32)
        return {"id": sample["id"], "logprobs": values, "token_ids": sample["response_ids"]}


class CriticRun(FakeRun):
    """A run with a critic."""

    critic: FakeTrainer

    def _scorers(self) -> FakeScorers:
        return ValuedScorers()

    def _trainer(self, store: Path) -> FakeTrainer:
        self.critic = ValueTrainer(store / "critic")
        self.critic.store.mkdir()
        return AnsweringTrainer(store)

    async def __aenter__(self) -> Any:
        await self.critic.start()
        return await super().__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        await self.critic.stop()

    def write_services(self) -> None:
        """With the critic's two addresses."""
        super().write_services()
        path = self.run_dir / "services.json"
        services = json.loads(path.read_text())
        services["critic"] = {"url": self.scorers.url, "application": CRITIC}
        services["trainer"]["critic_url"] = self.critic.url
        path.write_text(json.dumps(services))


class ValueTrainer(FakeTrainer):
    """A trainer of the critic: it notes updates and changes nothing."""

    def _apply(self, request: Any, samples: list[Any], loss: Any) -> Any:
        self.version = request.new_version
        self.optimizer_steps += 1
        context, weights = request.context, self.weights
        self.updates.append(
            Update(
                request.step,
                request.attempt,
                request.expect_version,
                request.new_version,
                samples,
                loss,
                request.learning_rate,
                True,
                context,
                weights,
                self.parts,
            )
        )
        return trainer_pb2.UpdateResponse(
            applied=True, stepped=True, metrics={"loss/critic": 0.25, "grad_norm": 1.0, "lr": request.learning_rate}
        )


PPO: dict[str, Any] = {
    "algorithm": {"estimator": "gae", "kl_coef": 0.0, "bootstrap_truncated": True},
    "scorers": {"critic": {"learning_rate": 1e-3}},
}


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_critic_learns_from_each_batch_and_its_weights_are_named_to_its_deployment(
    tmp_path: Path, staleness: int
) -> None:
    debug = {"tracking": {"debug_mode": True}}
    async with CriticRun(tmp_path, prompts=8, pipeline={"max_staleness": staleness}, **debug, **PPO) as run:
        assert await run.run() == 0, run.error()
        assert [update.new for update in run.critic.updates] == [update.new for update in run.updates]
        for update in run.critic.updates:
            assert update.loss.policy_loss == "value"
            assert update.loss.options == {"value_clip": 0.2}
            assert update.learning_rate == pytest.approx(1e-3)
            for sample in update.samples:
                assert sample.values is not None
                assert sample.values.tolist() == [0.5] * len(sample.response_ids)
                # A cut response is valued as if it went on; one that ended is not.
                assert sample.bootstrap_value == (0.5 if sample.truncated else 0.0)
                assert sample.returns is not None
                assert sample.advantages is None
        told = [tensor for event in run.events("tensors") for tensor in event["tensors"]]
        names = {(tensor["role"], tensor["name"]) for tensor in told}
        assert {("critic", "logits"), ("critic", "values"), ("trainer", "logprobs")} <= names
        assert {tuple(tensor) for tensor in told} == {("role", "name", "dtype", "device", "shapes")}
        for row in run.rollouts():  # what a sample cost is stored with it
            assert row["critic_seconds"] > 0
            assert row["peak_memory_bytes"] == 1 << 20
            assert row["prompt_tokens"] > 0
            assert row["response_tokens"] == len(row["response_ids"])
        # What its update is made again from.
        stored = {row["sample_id"]: row for row in run.rollouts()}
        schedule = read_schedule(run.run_dir)
        for update in run.critic.updates:
            made = schedule[update.step].critic
            assert (made["learning_rate"], LossSpec(**made["loss"])) == (update.learning_rate, update.loss)
            assert (made["left_out"], bool(made["digest"])) == ([], True)
            for sample in update.samples:
                row = stored[sample.sample_id]
                assert (row["values"], row["bootstrap_value"]) == (sample.values.tolist(), sample.bootstrap_value)
                assert row["returns"] == sample.returns.tolist()
        named = [weights["path"] for weights in run.scorers.weights]  # type: ignore[attr-defined]
        assert len(set(named)) > 1
        metrics = run.metrics()
        assert all(line["metrics"]["loss/critic"] == 0.25 for line in metrics)
        assert {"timing/values", "timing/update_critic", "critic/value_mean"} <= set(metrics[0]["metrics"])
        assert [Path(folder).parent.name for folder in run.critic.saves] == ["critic"]


async def test_policy_and_critic_go_back_to_one_step(tmp_path: Path) -> None:
    async with CriticRun(tmp_path, prompts=8, trainer={"save_freq": 2}, **PPO) as run:
        run.trainer.faults.plan("internal", "Update", skip=3, times=None)
        assert await run.run() != 0
        run.trainer.faults.clear()
        assert await run.run(resume=True) == 0, run.error()
        assert [update.step for update in run.critic.updates][-2:] == [3, 4]
        assert run.critic.updates[-2].expect == run.updates[-2].expect


async def test_vtrace_compares_with_the_trained_policy_and_warm_up_leaves_it_alone(tmp_path: Path) -> None:
    settings = {
        "algorithm": {"estimator": "vtrace", "policy_loss": "ppo_clip_proximal", "kl_coef": 0.0},
        "scorers": {"critic": {"warmup_steps": 1}},
    }
    async with CriticRun(tmp_path, prompts=8, **settings) as run:
        assert await run.run() == 0, run.error()
        assert [update.stepped for update in run.updates][:2] == [False, True]
        assert len(run.critic.updates) == len(run.updates)
        first = read_schedule(run.run_dir)[1]
        assert len(first.left_out) == len(run.critic.updates[0].samples)  # of the policy's update alone
        assert first.critic["left_out"] == []
        assert not any("nothing to learn" in text for text in run.warnings())


async def test_groups_without_a_signal_are_left_out_and_others_take_their_place(tmp_path: Path) -> None:
    settings = {"algorithm": {"filter_zero_spread": True, "kl_coef": 0.0}, "rollout": {"n": 2, "batch_size": 2}}
    async with FakeRun(tmp_path, prompts=40, trainer={"total_steps": 5}, **settings) as run:
        run.scorers.reward = _every_third_equal
        assert await run.run() == 0, run.error()
        books = balance(run)
        assert books["trained"] == 10
        assert books["dropped_filtered"] > 0
        assert sum(line["metrics"]["rollout/filtered_groups"] for line in run.metrics()) <= books["dropped_filtered"]
        for update in run.updates:
            groups: dict[str, list[Any]] = {}
            for sample in update.samples:
                groups.setdefault(sample.group_id, []).append(sample.reward)
            assert all(len(set(rewards)) > 1 for rewards in groups.values())


async def test_a_job_whose_groups_never_differ_ends_with_that_reason(tmp_path: Path) -> None:
    settings = {"algorithm": {"filter_zero_spread": True, "filter_limit": 3, "kl_coef": 0.0}}
    async with FakeRun(tmp_path, prompts=12, **settings) as run:
        run.scorers.reward = lambda sample: 1.0
        assert await run.run() == 1
        assert "all rewards were equal in each of the last 6 prompt groups" in run.error()
        assert run.updates == []


def _every_third_equal(sample: dict[str, Any]) -> float:
    group, slot = sample["id"].rsplit(".", 1)
    return 1.0 if int(group[1:]) % 3 == 0 else float(slot)


@pytest.mark.parametrize("who", ["critic", "trainer"])
async def test_policy_and_critic_are_lost_and_started_together(tmp_path: Path, who: str) -> None:
    settings = {"trainer": {"save_freq": 2}, "pipeline": {"max_staleness": 0}, **PPO}
    async with CriticRun(tmp_path, prompts=16, **settings) as run:
        dying = getattr(run, who)
        fault = dying.faults.plan("rank_died", "Update", skip=4)

        async def watch(job: Any) -> None:
            await run.until(lambda: fault.used, "the fault")
            for trainer in (run.trainer, run.critic):
                await trainer.die()
                await trainer.start_again()
            run.write_services()
            await asyncio.sleep(60)

        assert await run.run(watch=watch) == 0, run.error()
        assert balance(run) == {"issued": 16, "trained": 16}
        # After the loss in step 5 both go on from the checkpoint of step 4.
        steps = [update.step for update in run.critic.updates]
        assert steps[:4] == [1, 2, 3, 4]
        assert steps[-4:] == [5, 6, 7, 8]
        assert [u.expect for u in run.critic.updates][-4:] == [u.expect for u in run.updates][-4:]


async def test_a_local_and_a_remote_reference_are_mixed_by_weight(tmp_path: Path) -> None:
    remote = FakeScorers()
    remote.perturb = lambda _, results: [r | {"logprobs": r["logprobs"] - np.float32(1.0)} for r in results]
    await remote.start()
    try:
        mixed = {"reference": {"mixed_with": [{"url": remote.url, "weight": 0.25}]}}
        async with FakeRun(tmp_path, prompts=4, scorers=mixed) as run:
            assert await run.run() == 0, run.error()
            shift = np.log(0.75 + 0.25 * np.exp(-1.0))
            for update in run.updates:
                for sample in update.samples:
                    local = policy.score(policy.base_bias(), sample.prompt_ids, sample.response_ids)
                    assert sample.ref_logprobs == pytest.approx(local + shift, abs=1e-5)
            assert remote.calls
    finally:
        await remote.stop()
