"""vLLM servers known only by their URL, tier by tier: which may draw for training, and which may be a frozen role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.wire.errors import RoleError, RoleTimeoutError
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.frozen import FrozenModel
from orchestrator.runner.tiers import Tier
from tests.fakes import policy
from tests.fakes.audit import audit
from tests.fakes.engine import FakeEngine
from tests.fakes.requests import GENERATE
from tests.fakes.run import FakeRun

DEV_MODE = frozenset({"/pause", "/resume", "/is_paused", "/update_weights", "/weight_info"})
#: Tier -> how a server comes to it.
TIERS: dict[Tier, list[dict[str, Any]]] = {
    Tier.FULL: [{}, {"vllm": "0.26.0"}, {"route": False}],
    Tier.VERSIONS: [{"missing": DEV_MODE}, {"missing": DEV_MODE, "route": False}, {"missing": {"weight_transfer"}}],
    Tier.PLAIN: [
        {"missing": DEV_MODE | {GENERATE}, "route": False},
        {"vllm": "0.28.0", "missing": DEV_MODE, "route": False},
    ],
}
CASES = [(tier, how) for tier, ways in TIERS.items() for how in ways]
SEQUENCES = [
    SequenceInput(id="a", prompt_ids=np.array([1, 5, 6], np.int32), response_ids=np.array([7, 8, 2], np.int32)),
    SequenceInput(id="b", prompt_ids=np.array([1], np.int32), response_ids=np.array([9], np.int32)),
]


@asynccontextmanager
async def served(
    folder: Path, how: dict[str, Any], away_s: float = 5.0
) -> AsyncIterator[tuple[FakeEngine, FrozenModel]]:
    engine = FakeEngine(folder, **{**how, "missing": frozenset(how.get("missing", ()))})
    await engine.start()
    model = FrozenModel("reference", engine.address["url"], engine.token, timeout_s=5.0, away_s=away_s)
    try:
        yield engine, model
    finally:
        await model.close()
        await engine.stop()


@pytest.mark.parametrize(("tier", "how"), CASES)
async def test_every_tier_scores_as_the_trainer_would(tmp_path: Path, tier: Tier, how: dict[str, Any]) -> None:
    async with served(tmp_path, how) as (engine, model):
        assert (await model.standing()).tier is tier
        scored = await model.score(SEQUENCES, "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
        assert [result["id"] for result in scored.results] == ["a", "b"]
        for sequence, result in zip(SEQUENCES, scored.results, strict=True):
            ids = [*sequence["prompt_ids"].tolist(), *sequence["response_ids"].tolist()]
            expected = policy.score(engine.weights, ids[:1], ids[1:])[len(sequence["prompt_ids"]) - 1 :]
            np.testing.assert_allclose(result["logprobs"], expected, rtol=1e-6)
            assert result["response_ids"] is sequence["response_ids"]
        path = "/v1/completions" if tier is Tier.PLAIN else GENERATE
        asked = [call for call in engine.calls(path) if call.body]
        assert len(asked) == 2
        assert all(call.headers["traceparent"].startswith("00-1") for call in asked)


@pytest.mark.parametrize(("tier", "how"), [case for case in CASES if case[0] is not Tier.FULL])
async def test_a_server_that_is_not_full_is_refused_as_rollout_for_training(
    tmp_path: Path, tier: Tier, how: dict[str, Any]
) -> None:
    async with FakeRun(tmp_path, prompts=4, route=how.get("route", True)) as run:
        run.engine.missing = frozenset(how["missing"])
        run.engine.vllm = how.get("vllm", run.engine.vllm)
        assert await run.run() == 1
        assert "[rollout] vLLM server rollout-0 does not offer" in run.error()
        assert not run.samples()


@pytest.mark.parametrize("how", [ways[0] for ways in TIERS.values()])
async def test_a_reference_behind_a_vllm_server_gives_the_same_run(
    tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KL term of a run whose reference is a vLLM server of any tier is that of a deployed reference."""
    references = []
    settings = {"pipeline": {"max_staleness": 0, "deterministic": True}}
    for name in ("deployed", "server"):
        folder = tmp_path / name
        folder.mkdir()
        engine = FakeEngine(folder, "reference", **{**how, "missing": frozenset(how.get("missing", ()))})
        await engine.start()
        monkeypatch.setenv("NIGHTSHIFT_REFERENCE_TOKEN", engine.token)
        try:
            async with FakeRun(folder, prompts=8, **settings) as run:
                if name == "server":
                    run.reference_url = engine.address["url"]
                    run.write_services()
                assert await run.run() == 0, run.error()
                audit(run, steps=4, staleness=0)
                samples = [sample for update in run.updates for sample in update.samples]
                references.append(np.concatenate([sample.ref_logprobs for sample in samples]))
        finally:
            await engine.stop()
    assert len(references[0]) > 50
    np.testing.assert_allclose(references[0], references[1], atol=1e-6)


async def test_a_wrong_token_and_a_server_that_is_away_are_named(tmp_path: Path) -> None:
    async with served(tmp_path, {}, away_s=0.3) as (engine, model):
        wrong = FrozenModel("teacher", engine.address["url"], "wrong", timeout_s=5.0, away_s=0.3)
        with pytest.raises(RoleError, match=r"refuses the token\. Set NIGHTSHIFT_TEACHER_TOKEN"):
            await wrong.describe()
        await wrong.close()
        await model.describe()
        await engine.kill()
        with pytest.raises(RoleTimeoutError, match=r"http://127\.0\.0\.1:\d+ was away for 0\.3 s"):
            await model.score(SEQUENCES)


async def test_a_server_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    async with served(tmp_path, {}, away_s=10.0) as (engine, model):
        await model.describe()
        token = engine.token
        await engine.kill()
        scoring = asyncio.create_task(model.score(SEQUENCES))
        await asyncio.sleep(0.3)
        await engine.start()
        engine.token = token
        assert len((await scoring).results) == 2


@pytest.mark.parametrize("spoil", ["short", "missing", "positive", "null"])
async def test_an_answer_that_is_no_log_prob_of_each_token_is_refused(
    tmp_path: Path, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, {}) as (engine, model):
        whole = engine._score

        async def spoiled(request: Any) -> dict[str, Any]:
            answer = await whole(request)
            rows = answer["prompt_logprobs"]
            if spoil == "short":
                rows.pop()
            elif spoil == "missing":
                rows[-1] = {"1000": rows[-1].popitem()[1]}
            else:
                next(iter(rows[-1].values()))["logprob"] = 0.5 if spoil == "positive" else None
            return answer

        monkeypatch.setattr(engine, "_score", spoiled)
        with pytest.raises(RoleError, match=r"scored|left out|cannot be"):
            await model.score(SEQUENCES)
