"""Answers of servers and scorers that must not be trained on, or exactly as they are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.audit import audit, balance, final_updates
from tests.fakes.requests import Request
from tests.fakes.run import FakeRun
from tests.fixtures.tokenizer_k import BOS, EOS

A, B, AB = 4, 5, 63


def group_of(request: Request) -> int:
    return int(request.request_id.split(".")[-3][1:])


def slot_of(request: Request) -> int:
    return int(request.request_id.split(".")[-2])


def totals(run: FakeRun, name: str) -> float:
    return sum(line["metrics"].get(name) or 0 for line in run.metrics())


async def test_o29_sampled_ids_win(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        run.engine.script = lambda request: [A, B, EOS]
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        samples = [sample for update in run.updates for sample in update.samples]
        assert len(samples) == 8
        for sample in samples:
            assert sample.response_ids.tolist() == [A, B, EOS]
            assert sample.loss_mask.tolist() == [1, 1, 1]
            assert AB not in sample.response_ids
        assert all(row["response_text"] == "ab" for row in run.rollouts())


async def test_o29_an_answer_to_another_request_is_rejected_and_counted(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        run.engine.faults.plan("wrong_id", times=3)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert totals(run, "rollout/rejected/request_id") == 3


async def test_o29_only_wrong_answers_end_the_run_with_that_reason(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"retries": 1}) as run:
        run.engine.faults.plan("wrong_id", times=None)
        assert await run.run() == 1
        assert "[rollout]" in run.error()
        assert "asked for" in run.error()
        assert not run.updates


async def test_o30_one_bos_and_the_trainers_prompt_is_the_engines(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        assert await run.run() == 0, run.error()
        asked = {tuple(request.prompt_ids) for request in run.samples()}
        assert all(ids.count(BOS) == 1 and ids[0] == BOS for ids in asked)
        samples = [sample for update in run.updates for sample in update.samples]
        assert {tuple(sample.prompt_ids.tolist()) for sample in samples} == asked
        assert all(BOS not in sample.response_ids for sample in samples)


@pytest.mark.parametrize("fault", ["short_logprobs", "null_logprob", "positive_logprob"])
async def test_o31_broken_log_probs_are_rejected_and_counted(tmp_path: Path, fault: str) -> None:
    settings = {"pipeline": {"retries": 0}, "rollout": {"n": 4, "batch_size": 1}}
    async with FakeRun(tmp_path, prompts=2, **settings) as run:
        run.engine.faults.plan(fault, times=None, when=lambda request: slot_of(request) == 1)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        for update in run.updates:
            assert [sample.sample_id[-1] for sample in update.samples] == ["0", "2", "3"]
        assert totals(run, "rollout/rejected/logprobs") == 2
        assert totals(run, "rollout/failed_samples") == 2


async def test_o31_a_log_prob_of_zero_is_valid(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=2) as run:
        run.engine.script = lambda request: [A, A, EOS]
        run.engine.faults.plan("zero_logprobs", times=None)
        assert await run.run() == 0, run.error()
        samples = [sample for update in run.updates for sample in update.samples]
        assert len(samples) == 4
        assert all((sample.logprobs == 0).all() for sample in samples)


async def test_o31_only_broken_log_probs_end_the_run_with_that_reason(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"retries": 0}) as run:
        run.engine.faults.plan("null_logprob", times=None)
        assert await run.run() == 1
        assert "log-prob nan" in run.error()
        assert not run.updates


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("no_versions", "versions"),
        ("gap", "versions"),
        ("bad_finish", "finish_reason"),
        ("unknown_version", "version"),
        ("null_version", "version"),
    ],
)
async def test_answers_without_a_known_origin_are_asked_for_again(tmp_path: Path, fault: str, kind: str) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        run.engine.faults.plan(fault, times=2)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert totals(run, f"rollout/rejected/{kind}") == 2
        assert balance(run) == {"issued": 4, "trained": 4}


@pytest.mark.parametrize("route", [True, False])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("wrong_id", "request_id"),
        ("strange_token", "token_ids"),
        ("other_tokens", "logprobs"),
        ("short_logprobs", "logprobs"),
        ("null_logprob", "logprobs"),
        ("positive_logprob", "logprobs"),
        ("unfinished", "form"),
        ("done", "form"),
        ("unknown_version", "version"),
    ],
)
async def test_o29_o31_no_broken_answer_is_trained_on_whatever_the_route(
    tmp_path: Path, route: bool, fault: str, kind: str
) -> None:
    """Wrong ids, log-probs that are missing or positive, an old version, half a stream and then its end."""
    if (fault, route) in (("other_tokens", True), ("done", False)):
        return  # frames hold ids and log-probs side by side; JSON has no stream
    if fault == "unfinished" and not route:
        kind = "finish_reason"
    settings = {"rollout": {"max_response_length": 12, "flush_tokens": 5}}
    async with FakeRun(tmp_path, prompts=4, route=route, **settings) as run:
        run.engine.script = lambda request: [7 + at for at in range(12)][len(request.prompt_ids) - shortest(run) :]
        run.engine.faults.plan(fault, times=2, skip=1)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert totals(run, f"rollout/rejected/{kind}") == 2
        assert balance(run) == {"issued": 4, "trained": 4}
        for sample in (sample for update in run.updates for sample in update.samples):
            assert sample.response_ids.tolist() == [7 + at for at in range(12)]


@pytest.mark.parametrize(("route", "tokens"), [(True, 9), (True, 1_000_000), (False, 9)])
async def test_o29_an_answer_beyond_what_was_asked_for_is_refused(tmp_path: Path, route: bool, tokens: int) -> None:
    """A million tokens stand for an endless stream: what was asked for is all that is taken in of it."""
    settings = {"rollout": {"max_response_length": 8, "flush_tokens": 2}}
    async with FakeRun(tmp_path, prompts=4, route=route, **settings) as run:
        endless = run.engine.faults.plan(f"long@{tokens}", times=2)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert endless.used == 2
        assert totals(run, "rollout/rejected/length") == 2
        assert balance(run) == {"issued": 4, "trained": 4}
        long = [request for request in run.samples() if request.fault == f"long@{tokens}"]
        assert all(len(request.tokens) < 100_000 for request in long)


def shortest(run: FakeRun) -> int:
    """Tokens of the prompts, which are all of one length here."""
    return min(len(request.prompt_ids) for request in run.samples())


async def test_an_old_version_is_refused_and_the_server_pushed_again(tmp_path: Path) -> None:
    """A server that goes back to older weights, and says so, gets no more work before it holds the published ones."""
    async with FakeRun(tmp_path, prompts=12, pipeline={"max_staleness": 0}) as run:
        engine = run.engine
        first: dict[str, object] = {}

        def go_back(request: Request) -> bool:
            if request.version.endswith("/0"):
                first.setdefault("weights", engine.weights)
                first.setdefault("version", engine.version)
            if request.version.endswith("/3") and "done" not in first:
                first["done"] = True
                engine.weights, engine.version = first["weights"], first["version"]  # type: ignore[assignment]
            return False

        engine.faults.plan("none", when=go_back)
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=0)
        assert totals(run, "rollout/rejected/version") >= 1
        pushed = [call.body["weight_version"][-2:] for call in engine.calls("/finish_weight_update")]
        assert pushed.count("/3") == 2
        assert max(line["metrics"]["log_ratio/abs_mean"] for line in run.metrics()) < 1e-6


async def test_o33_masks_and_the_end_of_sequence(tmp_path: Path) -> None:
    answers = [[7, 8, EOS], [7, 8, 9, 9, 9, 9], [7, EOS], [EOS]]
    settings = {"rollout": {"n": 4, "batch_size": 1, "max_response_length": 6}}
    async with FakeRun(tmp_path, prompts=1, **settings) as run:
        run.engine.script = lambda request: answers[slot_of(request)]
        assert await run.run() == 0, run.error()
        (update,) = run.updates
        assert [sample.trained_tokens for sample in update.samples] == [3, 6, 2, 1]
        assert [sample.response_ids.tolist() for sample in update.samples] == answers
        assert [sample.truncated for sample in update.samples] == [False, True, False, False]
        assert run.metrics()[0]["metrics"]["response_length/truncated_share"] == 0.25
        assert update.loss.total_tokens == 12


async def test_o34a_an_empty_response_takes_no_part(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=2, rollout={"n": 4}) as run:
        run.engine.faults.plan("empty", times=None, when=lambda request: slot_of(request) == 2)
        assert await run.run() == 0, run.error()
        (update,) = run.updates
        assert len(update.samples) == 6
        assert all(np.isfinite(sample.advantages).all() for sample in update.samples)
        assert run.metrics()[0]["metrics"]["advantage/empty_samples"] == 2
        assert all(value is not None for value in run.metrics()[0]["metrics"].values())


async def test_o34b_a_batch_without_a_token_makes_no_step(tmp_path: Path) -> None:
    settings = {"trainer": {"lr_schedule": "linear", "total_steps": 4}, "pipeline": {"max_staleness": 0}}
    async with FakeRun(tmp_path, prompts=8, **settings) as run:
        run.engine.faults.plan("empty", times=None, when=lambda request: group_of(request) in (2, 3))
        assert await run.run() == 0, run.error()
        first, skipped, third, _ = run.updates
        np.testing.assert_array_equal(first.weights, skipped.weights)
        assert not skipped.stepped
        rates = [update.learning_rate for update in run.updates if update.stepped]
        assert third.learning_rate == skipped.learning_rate == rates[1]  # the skipped step held no position
        assert run.metrics()[1]["metrics"]["update/skipped"] == 1
        assert any("step 2 had nothing to learn from" in text for text in run.warnings())


async def test_o36_an_unscored_sample_is_no_zero(tmp_path: Path) -> None:
    settings = {"rollout": {"n": 4, "batch_size": 1}, "algorithm": {"kl_coef": 0.0}}
    async with FakeRun(tmp_path, prompts=1, **settings) as run:
        scores = iter([1.0, None, 0.0, 0.0])
        run.scorers.reward = lambda sample: next(scores)
        assert await run.run() == 0, run.error()
        (update,) = run.updates
        assert [sample.sample_id[-1] for sample in update.samples] == ["0", "2", "3"]
        advantages = [float(sample.advantages[0]) for sample in update.samples]
        np.testing.assert_allclose(advantages, [1.154699, -0.577349, -0.577349], atol=1e-5)
        metrics = run.metrics()[0]["metrics"]
        assert metrics["reward/mean"] == pytest.approx(1 / 3)
        assert (metrics["reward/valid"], metrics["reward/unscored"]) == (3, 1)
        unscored = [row for row in run.rollouts() if row["reward"] is None]
        assert [row["reward_error"] for row in unscored] == ["none: no score"]


async def test_o35_too_many_unscored_samples_end_the_run_with_the_first_cause(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"failure_budget": 0.2}) as run:
        run.scorers.faults.plan("unscored", "reward", times=None)
        assert await run.run() == 1
        assert "[reward]" in run.error()
        assert "ZeroDivisionError: division by zero" in run.error()
        assert "pipeline.failure_budget (now 0.2)" in run.error()


async def test_o36_a_reward_that_is_not_finite_ends_as_a_failure_never_as_a_score(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        run.scorers.faults.plan("not_finite", "reward", times=None)
        assert await run.run() == 1
        assert "[reward]" in run.error()
        assert re.search(r"wanted answered nan for g000000\d\.\d: expected a finite float", run.error())


@pytest.mark.parametrize("fault", ["count", "order", "garbage", "refuse"])
@pytest.mark.parametrize("application", ["reward", "reference"])
async def test_o48_results_for_other_samples_are_rejected(tmp_path: Path, application: str, fault: str) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        run.scorers.faults.plan(fault, application, times=None)
        assert await run.run() == 1
        assert f"[{application}]" in run.error()
        assert not run.updates


@pytest.mark.parametrize(("fault", "cause"), [("short", "log-probs for"), ("nan", "is no finite number")])
async def test_log_probs_of_the_reference_that_do_not_fit_are_rejected(tmp_path: Path, fault: str, cause: str) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        run.scorers.faults.plan(fault, "reference", times=None)
        assert await run.run() == 1
        assert "[reference]" in run.error()
        assert cause in run.error()


@pytest.mark.parametrize(
    ("application", "fault"),
    [
        *(("reward", fault) for fault in ("count", "other_group", "not_finite", "huge", "no_maps", "no_parts")),
        *(("reference", fault) for fault in ("count", "other_group", "no_maps", "no_ids", "positive", "nan")),
    ],
)
async def test_one_wrong_answer_of_a_scorer_costs_its_group_and_not_the_run(
    tmp_path: Path, application: str, fault: str
) -> None:
    async with FakeRun(tmp_path, prompts=12, scorers={"batch_samples": 1}, trainer={"total_steps": 4}) as run:
        run.scorers.faults.plan(fault, application, times=1, skip=2)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert balance(run) == {"issued": 9, "trained": 8, "failed": 1}
        assert totals(run, "rollout/failed_groups") == 1


@pytest.mark.parametrize("perturbed", ["reward", "reference"])
async def test_nothing_is_decoration(tmp_path: Path, perturbed: str) -> None:
    """Inverted rewards and shifted reference log-probs change the advantages, the loss and the weights."""
    weights = []
    for name in ("plain", "perturbed"):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"pipeline": {"max_staleness": 0, "deterministic": True}, "algorithm": {"kl_coef": 0.1}}
        async with FakeRun(folder, prompts=4, **settings) as run:
            run.scorers.reward = lambda sample: float(np.mean(sample["response_ids"])) / 64
            if name == "perturbed":
                run.scorers.perturb = lambda application, results: [
                    _perturbed(result) if application.startswith(perturbed) else result for result in results
                ]
            assert await run.run() == 0, run.error()
            weights.append(final_updates(run)[0].weights)
    assert np.abs(weights[0] - weights[1]).max() > 1e-4


def _perturbed(result: dict[str, object]) -> dict[str, object]:
    if "score" in result:
        return result | {"score": 1.0 - float(result["score"])}  # type: ignore[arg-type]
    return result | {"logprobs": result["logprobs"] - np.float32(0.5)}  # type: ignore[operator]
