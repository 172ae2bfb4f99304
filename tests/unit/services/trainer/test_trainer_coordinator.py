"""The coordinator with ranks that only write down what they are asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nightshift.wire import codec, telemetry
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError, VersionConflictError
from nightshift.wire.experience import LossSpec, Sample, pack_loss, pack_samples, unpack_samples
from nightshift.wire.trace import TraceContext
from services.trainer.coordinator import Coordinator, RankFailedError, UpdateCall
from services.trainer.folders import MANIFEST
from services.trainer.servicer import status_code
from services.trainer.store import Publication
from services.trainer.sums import PartSums
from services.trainer.updates import OrderError, PartKey
from tests.fixtures.samples import make_sample

FACTS = {
    "model": "toy",
    "dtype": "float32",
    "zero_stage": 2,
    "parameters": 10,
    "vocab_size": 64,
    "max_positions": 128,
    "optimizer_steps": 0,
}


class FakeRanks:
    """Two ranks: each holds half of the samples; calls are written down, and may be held up or fail."""

    world = 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.held = 0  # samples whose gradient is held

    async def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [getattr(self, method)(rank, *args) for rank in range(self.world)]

    def give_up(self, error: RankFailedError) -> None:
        self.error = error

    def made(self, method: str) -> int:
        return sum(call[0] == method for call in self.calls)

    def accumulate(self, rank: int, samples: bytes, loss: bytes, loss_divisor: float, discard: bool) -> PartSums:
        if rank:
            return PartSums()
        kept = unpack_samples(samples)
        self.held = len(kept) + (0 if discard else self.held)
        tokens = sum(sample.trained_tokens for sample in kept)
        return PartSums(tokens=tokens, sequences=len(kept), loss=2.0 * tokens, policy=2.0 * tokens)

    def apply(self, rank: int, divisor: float, learning_rate: float) -> dict[str, float]:
        self.held = 0
        return {"grad_norm": 1.0, "lr": learning_rate}

    def discard(self, rank: int) -> None:
        self.held = 0

    def log_probs(self, rank: int, sequences: bytes, exact: bool) -> bytes:
        items = codec.unpack(sequences)
        mine = items[len(items) * rank // 2 : len(items) * (rank + 1) // 2]
        return codec.pack([{"id": item["id"], "logprobs": np.zeros(len(item["response_ids"]))} for item in mine])

    def publish(self, rank: int, store: str) -> Publication | None:
        path = Path(store) / f"{self.made('publish')}.safetensors"
        path.write_bytes(b"weights")
        return Publication({"path": path.name}, "ab" * 32, 7, 1.0) if rank == 0 else None

    def save_state(self, rank: int, folder: str) -> None:
        (Path(folder) / f"rank{rank}").write_text("state")

    def export(self, rank: int, folder: str, dtype: str | None) -> None:
        (Path(folder) / "model.safetensors").write_text(str(dtype))

    def load_state(self, rank: int, folder: str) -> int:
        return 7

    def peak_memory(self, rank: int) -> int:
        return 100

    def tensors(self, rank: int) -> list[dict[str, Any]]:
        return [{"role": "trainer", "name": "logprobs", "shape": [8], "dtype": "float32", "device": f"cuda:{rank}"}]


def call(
    step: int = 1, attempt: int = 0, part: int = 0, final: bool = True, samples: list[Sample] | None = None, **more: Any
) -> UpdateCall:
    if samples is None:
        samples = [make_sample(f"g.{n}", tokens=2, advantages=np.ones(2, np.float32)) for n in range(4)]
    loss = more.pop("loss", LossSpec())
    values: dict[str, Any] = {
        "expect_version": f"r/0/{step - 1}",
        "new_version": f"r/0/{step}",
        "learning_rate": 0.5,
        **more,
    }
    return UpdateCall(
        PartKey(step, attempt, part), final=final, samples=pack_samples(samples), loss=pack_loss(loss), **values
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def ready(tmp_path: Path, tracer: Any = None) -> tuple[Coordinator, FakeRanks]:
    ranks = FakeRanks()
    coordinator = Coordinator(ranks, dict(FACTS), tmp_path, None, tracer)
    await coordinator.load("", "r/0/0")
    ranks.calls.clear()
    return coordinator, ranks


async def test_an_update_is_applied_and_its_retry_gets_the_earlier_answer(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    answer = await coordinator.update(call())
    assert (answer.applied, answer.stepped, answer.repeated) == (True, True, False)
    assert answer.metrics["loss/actor"] == 2.0
    assert answer.metrics["lr"] == 0.5
    assert answer.peak_memory_bytes == 200
    again = await coordinator.update(call())
    assert again.repeated
    assert again.metrics == answer.metrics
    assert ranks.made("apply") == 1
    assert (coordinator.version, coordinator.optimizer_steps) == ("r/0/1", 1)


async def test_tensors_are_told_where_they_are_asked_for_and_by_one_rank(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    assert (await coordinator.update(call())).tensors == []
    assert ranks.made("tensors") == 0, "nobody asked"
    (told,) = (await coordinator.update(call(step=2, debug=True))).tensors
    assert (told["name"], told["device"]) == ("logprobs", "cuda:0")
    empty = await coordinator.update(call(step=3, samples=[], debug=True))
    assert (empty.stepped, empty.tensors) == (False, []), "of a part before this one there is nothing to tell"


async def test_a_retry_while_the_update_runs_waits_for_the_same_result(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    ranks.gate.clear()
    first = asyncio.create_task(coordinator.update(call()))
    await asyncio.sleep(0)
    second = asyncio.create_task(coordinator.update(call()))
    await asyncio.sleep(0.01)
    ranks.gate.set()
    answers = await asyncio.gather(first, second)
    assert [answer.repeated for answer in answers] == [False, True]
    assert ranks.made("apply") == 1


async def test_a_caller_that_goes_away_leaves_the_update_running(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    ranks.gate.clear()
    caller = asyncio.create_task(coordinator.update(call()))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    ranks.gate.set()
    answer = await coordinator.update(call())
    assert answer.repeated
    assert ranks.made("apply") == 1


async def test_parts_without_totals_are_divided_by_what_was_counted(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    first = await coordinator.update(call(part=0, final=False))
    assert (first.applied, first.stepped) == (False, False)
    await coordinator.update(call(part=1))
    assert [args[3] for args in ranks.calls if args[0] == "accumulate"] == [1.0, 1.0]
    assert [args[1] for args in ranks.calls if args[0] == "apply"] == [16.0]


async def test_parts_with_totals_are_divided_at_once(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    loss = LossSpec(total_tokens=16, total_sequences=8)
    await coordinator.update(call(part=0, final=False, loss=loss))
    await coordinator.update(call(part=1, loss=loss))
    assert [args[3] for args in ranks.calls if args[0] == "accumulate"] == [16.0, 16.0]
    assert [args[1] for args in ranks.calls if args[0] == "apply"] == [1.0]


async def test_parts_of_one_batch_need_one_loss(tmp_path: Path) -> None:
    coordinator, _ = await ready(tmp_path)
    await coordinator.update(call(part=0, final=False))
    with pytest.raises(BadInputError, match="different loss"):
        await coordinator.update(call(part=1, loss=LossSpec(clip_low=0.1)))


async def test_a_new_attempt_starts_from_nothing(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    await coordinator.update(call(part=0, final=False))
    answer = await coordinator.update(call(attempt=1, part=0, final=False))
    assert not answer.repeated
    assert ranks.held == 4
    with pytest.raises(OrderError):
        await coordinator.update(call(attempt=0, part=1))
    assert (await coordinator.update(call(attempt=1, part=1))).metrics["tokens"] == 16


async def test_a_failed_update_can_be_made_again(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    ranks.error = RoleError("out of memory", role="trainer")
    with pytest.raises(RoleError, match="out of memory"):
        await coordinator.update(call())
    assert coordinator.version == "r/0/0"
    ranks.error = None
    await coordinator.update(call())
    assert ranks.calls[-3][4] is True  # what the failed try had added is discarded
    assert coordinator.version == "r/0/1"


async def test_o34_a_batch_without_trained_tokens_makes_no_step(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    masked = [make_sample(f"g.{n}", mask=[0, 0], advantages=np.zeros(2, np.float32)) for n in range(2)]
    empty = make_sample("g.2", tokens=0, advantages=np.zeros(0, np.float32))
    answer = await coordinator.update(call(samples=[*masked, empty]))
    assert (answer.applied, answer.stepped) == (True, False)
    assert answer.metrics["tokens"] == 0
    assert ranks.made("accumulate") == ranks.made("apply") == 0
    assert (coordinator.version, coordinator.optimizer_steps) == ("r/0/1", 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"advantages": None}, "advantages"),
        ({"advantages": np.array([1, np.nan], np.float32)}, "not finite"),
        ({"response_ids": np.array([5, 64], np.int32)}, "vocabulary of 64"),
        ({"prompt_ids": np.ones(200, np.int32)}, "128 positions"),
        ({"prompt_ids": np.ones(0, np.int32)}, "empty prompt"),
    ],
)
async def test_a_sample_that_cannot_be_trained_on_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    coordinator, ranks = await ready(tmp_path)
    sample = make_sample("g.7", tokens=2, advantages=np.ones(2, np.float32))
    for name, value in change.items():
        setattr(sample, name, value)
    with pytest.raises(NightshiftError, match=f"g.7.*{named}"):
        await coordinator.update(call(samples=[sample]))
    assert not ranks.calls


async def test_a_kl_term_needs_reference_log_probs(tmp_path: Path) -> None:
    coordinator, _ = await ready(tmp_path)
    with pytest.raises(BadInputError, match="reference log-probs"):
        await coordinator.update(call(loss=LossSpec(kl_coef=0.1)))


async def test_log_probs_come_in_the_order_of_the_request(tmp_path: Path) -> None:
    coordinator, _ = await ready(tmp_path)
    ids = np.array([1, 2], np.int32)
    items: list[Any] = [{"id": str(n), "prompt_ids": ids, "response_ids": ids} for n in range(5)]
    assert [result["id"] for result in await coordinator.log_probs(items)] == ["0", "1", "2", "3", "4"]
    with pytest.raises(VersionConflictError):
        await coordinator.log_probs(items, version="r/0/9")


async def test_a_version_is_published_once(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    first = await coordinator.publish("r/0/0", [])
    assert (await coordinator.publish("r/0/0", [])).update_info == first.update_info
    assert ranks.made("publish") == 1
    with pytest.raises(VersionConflictError, match=r"r/0/0.*r/0/3"):
        await coordinator.publish("r/0/3", [])


async def test_a_save_appears_whole_and_loads(tmp_path: Path) -> None:
    coordinator, _ = await ready(tmp_path)
    state, export = tmp_path / "c/trainer/global_step_1", tmp_path / "c/actor/global_step_1"
    await coordinator.update(call())
    for _ in range(2):  # a retry replaces what the first try wrote
        await coordinator.save(str(state), str(export), json.dumps({"cursor": 3}))
    manifest = json.loads((state / MANIFEST).read_text())
    assert manifest["cursor"] == 3
    assert manifest["trainer"]["policy_version"] == "r/0/1"
    assert names(state.parent) == ["global_step_1"]
    assert names(export.parent) == ["global_step_1"]
    text, steps = await coordinator.load(str(state), "r/1/1")
    assert (json.loads(text), steps, coordinator.version) == (manifest, 7, "r/1/1")
    assert not (await coordinator.update(call(step=2, expect_version="r/1/1"))).repeated


async def test_o43_a_failed_save_leaves_earlier_ones_and_no_half_folder(tmp_path: Path) -> None:
    coordinator, ranks = await ready(tmp_path)
    state = tmp_path / "global_step_1"
    await coordinator.save(str(state), "", "{}")
    ranks.error = RoleError("cannot write: no space left on device", role="trainer")
    with pytest.raises(RoleError, match="no space"):
        await coordinator.save(str(tmp_path / "global_step_2"), "", "{}")
    assert names(tmp_path) == ["global_step_1"]
    assert (state / MANIFEST).is_file()


async def test_a_state_without_a_manifest_or_of_other_ranks_is_refused(tmp_path: Path) -> None:
    coordinator, _ = await ready(tmp_path)
    half = tmp_path / "global_step_1"
    half.mkdir()
    with pytest.raises(BadInputError, match=MANIFEST):
        await coordinator.load(str(half), "r/1/1")
    own = {"ranks": 1, "zero_stage": 2, "dtype": "float32"}
    (half / MANIFEST).write_text(json.dumps({"trainer": own}))
    with pytest.raises(BadInputError, match=r"trainer\.ranks 1, this trainer has 2"):
        await coordinator.load(str(half), "r/1/1")


async def test_trained_weights_are_not_taken_for_the_initial_ones(tmp_path: Path) -> None:
    """There is no way back to those but another trainer: this one goes on with nothing, so that it is replaced."""
    coordinator, ranks = await ready(tmp_path)
    await coordinator.update(call())
    with pytest.raises(RankFailedError, match="1 steps away"):
        await coordinator.load("", "r/1/0")
    assert isinstance(ranks.error, RankFailedError)
    assert status_code(ranks.error) is grpc.StatusCode.UNAVAILABLE
    assert "rank" in ranks.error.message  # how the runner knows that waiting would not help


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    telemetry.shutdown()


async def test_calls_are_spans_in_the_caller_s_trace(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    tracer = telemetry.setup("trainer", processors=[SimpleSpanProcessor(spans)])
    coordinator, _ = await ready(tmp_path, tracer)
    parent = TraceContext.new()
    await coordinator.update(call(traceparent=parent.traceparent))
    await coordinator.publish("r/0/1", [], parent.traceparent)
    await coordinator.save(str(tmp_path / "s"), "", "{}", parent.traceparent)
    named = {span.name: span for span in spans.get_finished_spans()}
    for name in ("trainer.update", "trainer.publish", "trainer.save"):
        assert f"{named[name].context.trace_id:032x}" == parent.trace_id
        assert f"{named[name].parent.span_id:016x}" == parent.span_id
    assert named["trainer.update"].attributes["nightshift.policy_version"] == "r/0/1"


def test_the_coordinator_s_process_never_loads_torch() -> None:
    import subprocess
    import sys

    program = "import sys, services.trainer.launch; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
