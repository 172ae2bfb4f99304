"""A scorer that is no Python and has no gRPC library: the example in JavaScript, in Playwright's Node.js."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import playwright
import pytest

from nightshift.wire.errors import RoleError
from orchestrator.runner.scorer import ScorerClient
from tests.fakes.run import FakeRun

SCORER = Path(__file__).resolve().parents[2] / "examples" / "remote_scorer" / "scorer.mjs"
NODE = Path(playwright.__file__).parent / "driver" / "node"


@asynccontextmanager
async def scorer() -> AsyncIterator[str]:
    """The example as a process; its address."""
    process = await asyncio.create_subprocess_exec(NODE, SCORER, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = int(await asyncio.wait_for(process.stdout.readline(), 60))
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def client(url: str) -> AsyncIterator[ScorerClient]:
    """The orchestrator's own client of it."""
    found = ScorerClient("reward", url, "outside", run_id="r", job_trace_id="0" * 32, timeout_s=60.0, away_s=60.0)
    try:
        yield found
    finally:
        await found.close()


def sample(name: str, response: str, truth: Any, tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "prompt": [{"role": "user", "content": "how much?"}],
        "response": response,
        "response_ids": np.arange(tokens, dtype=np.int32),
        "ground_truth": truth,
        "data_source": None,
        "extra_info": more,
        "finish_reason": "stop",
    }


async def test_results_are_one_for_each_sample_in_their_order() -> None:
    extra = {
        "at": -1,
        "big": -(2**40),
        "most": 2**63,
        "half": 0.5,
        "yes": True,
        "raw": b"\x00" * 300,
        "list": [1] * 70000,
    }
    samples = [
        sample("g0.0", "it is 42", 42, tokens=0, **extra),
        sample("g0.1", "no idea", "42", tokens=70_000),  # an array of 280,000 bytes
        sample("g0.2", "größer \N{GREEK SMALL LETTER PI}" * 20_000, "\N{GREEK SMALL LETTER PI}"),
        sample("g0.3", "anything", None),
        *(sample(f"g1.{at}", str(at), at, tokens=at) for at in range(300)),
    ]
    async with scorer() as url, client(url) as caller:
        described = await caller.describe()
        assert (described.role, described.model) == ("reward", "scorer.mjs")
        scored = await caller.score(samples)
    assert [result["id"] for result in scored.results] == [item["id"] for item in samples]
    assert [result["score"] for result in scored.results] == [1.0, 0.0, 1.0, None] + [1.0] * 300
    assert [result["parts"].get("tokens") for result in scored.results[:3]] == [0, 70_000, 3]
    assert (scored.results[3]["error_type"], scored.results[3]["error"]) == ("none", "no ground_truth")
    assert scored.seconds > 0


async def test_a_refusal_is_told_in_its_own_words_and_not_tried_again() -> None:
    async with scorer() as url, client(url) as caller:
        with pytest.raises(RoleError, match=r"INVALID_ARGUMENT.*sample g0\.0 has no response"):
            await caller.score([sample("g0.0", "x", 1) | {"response": None}])
        with pytest.raises(RoleError, match=r"INVALID_ARGUMENT.*cannot be read: array of <f4 with 1 axes"):
            await caller.score([sample("g0.0", "x", 1) | {"response_ids": np.zeros(2, np.float32)}])
        assert (await caller.score([sample("g0.0", "1", 1)])).results[0]["score"] == 1.0  # it is still there


class OutsideRun(FakeRun):
    """A run whose reward is the scorer that its job names."""

    def write_services(self) -> None:
        """With the address of the job file."""
        super().write_services()
        path = self.run_dir / "services.json"
        services = json.loads(path.read_text())
        (reward,) = self.spec.rewards
        services["rewards"][0]["url"] = reward.url  # type: ignore[union-attr]
        path.write_text(json.dumps(services))


async def test_a_run_is_rewarded_by_it(tmp_path: Path) -> None:
    async with scorer() as url:
        rewards = [{"type": "grpc", "url": url, "name": "outside"}]
        async with OutsideRun(tmp_path, prompts=8, rewards=rewards) as run:
            assert await run.run() == 0, run.error()
            assert not [call for call in run.scorers.calls if call.application == "reward-outside"]
            rows = run.rollouts()
            assert len(rows) == 16
            for update in run.updates:
                for item in update.samples:
                    assert item.reward in (0.0, 1.0)
                    assert item.reward_parts == {"tokens": float(len(item.response_ids))}
            for row in rows:
                truth = re.findall(r"word (\d+)", row["prompt_text"])[0]
                assert row["reward"] == float(truth in row["response_text"])
