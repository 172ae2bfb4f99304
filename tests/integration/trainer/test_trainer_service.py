"""The trainer as a service: coordinator and ranks as Ray actors, called over gRPC."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from nightshift.config import JobSpec
from nightshift.wire import codec
from nightshift.wire.errors import BadInputError, NightshiftError
from nightshift.wire.experience import LossSpec, Sample, pack_loss, pack_samples
from nightshift.wire.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc
from services.scorers.ingress import listens_beyond_loopback
from services.trainer.launch import TrainerHandle, start
from tests.fixtures.ray_cluster import ray_cluster
from tests.fixtures.samples import make_sample
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.integration

#: Deadline of a call, and of waiting for something to be noticed.
CALL_S = 60.0
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Client:
    """Calls one trainer, and keeps count of versions."""

    def __init__(self, handle: TrainerHandle, store: Path) -> None:
        self.handle = handle
        self.store = store
        self._channel = grpc.insecure_channel(handle.url.removeprefix("grpc://"), options=OPTIONS)
        self.stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def describe(self) -> Any:
        return self.stub.Describe(trainer_pb2.DescribeTrainerRequest(), timeout=CALL_S)

    def load(self, version: str, state_dir: str = "") -> Any:
        return self.stub.Load(trainer_pb2.LoadRequest(state_dir=state_dir, policy_version=version), timeout=CALL_S)

    def request(self, step: int, samples: list[Sample], lineage: int = 0, **fields: Any) -> Any:
        values: dict[str, Any] = {
            "attempt": 0,
            "part": 0,
            "final": True,
            "expect_version": f"r/{lineage}/{step - 1}",
            "new_version": f"r/{lineage}/{step}",
            "learning_rate": 1e-3,
            "loss": pack_loss(LossSpec()),
            **fields,
        }
        return trainer_pb2.UpdateRequest(step=step, samples=pack_samples(samples), **values)

    def update(self, step: int, samples: list[Sample], **fields: Any) -> Any:
        return self.stub.Update(self.request(step, samples, **fields), timeout=CALL_S)

    def publish(self, version: str, probe: list[Any] | None = None) -> Any:
        request = trainer_pb2.PublishRequest(policy_version=version, probe=codec.pack(probe or []))
        return self.stub.Publish(request, timeout=CALL_S)

    def weights(self, version: str) -> dict[str, torch.Tensor]:
        return load_file(self.store / codec.unpack(self.publish(version).update_info)["path"])

    def loss(self, version: str, samples: list[Sample]) -> dict[str, float]:
        context = common_pb2.Context(policy_version=version)
        packed = pack_samples(samples)
        request = trainer_pb2.LossRequest(context=context, samples=packed, loss=pack_loss(LossSpec()))
        return dict(self.stub.Loss(request, timeout=CALL_S).metrics)

    def log_probs(self, probe: list[Any]) -> list[Any]:
        answer = self.stub.LogProbs(trainer_pb2.LogProbsRequest(samples=codec.pack(probe)), timeout=CALL_S)
        return list(codec.unpack(answer.results))


def batch(count: int = 7, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        tokens = int(rng.integers(1, 8))
        sample = make_sample(f"g{index // 2}.{index % 2}", tokens=tokens)
        sample.response_ids = rng.integers(5, 120, tokens).astype(np.int32)
        sample.logprobs = (-4 - rng.random(tokens)).astype(np.float32)
        sample.advantages = rng.normal(size=tokens).astype(np.float32)
        samples.append(sample)
    return samples


def probe_of(samples: list[Sample]) -> list[Any]:
    return [{"id": s.sample_id, "prompt_ids": s.prompt_ids, "response_ids": s.response_ids} for s in samples]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    with ray_cluster(num_cpus=6) as folder:
        yield folder


Start = Callable[..., Any]


@pytest.fixture(scope="module")
def begin(ray_folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    @contextmanager
    def run(port: int = 0, path: Path = model, **trainer: Any) -> Iterator[Client]:
        # A large epsilon: Adam's first step is the gradient's sign otherwise, which makes rounding errors of it large.
        settings = {"adam_epsilon": 1e-2, "start_timeout_s": 120, **trainer}
        spec = JobSpec.model_validate(
            {
                "name": "trainer-test",
                "model": {"path": str(path)},
                "data": {"train_files": ["unused.parquet"]},
                "rewards": [{"function": "unused.py:reward"}],
                "trainer": settings,
                "resources": {"device": "cpu"},
            }
        )
        store = tmp_path_factory.mktemp("store")
        handle = start(spec, port, store, None, "r")
        client = Client(handle, store)
        try:
            client.load("r/0/0")
            yield client
        finally:
            client.close()
            handle.stop()

    return run


@pytest.fixture(scope="module")
def one(begin: Start) -> Iterator[Client]:
    """A trainer of one rank; tests go on from the version that it has."""
    with begin() as client:
        yield client


@pytest.fixture
def next_step(one: Client) -> int:
    return int(one.describe().policy_version.rpartition("/")[2]) + 1


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_a_trainer_says_what_it_is(one: Client) -> None:
    answer = one.describe()
    assert (answer.dtype, answer.ranks, answer.vocab_size, answer.max_positions) == ("float32", 1, 128, 256)
    assert list(answer.parallelisms) == ["data"]
    assert one.handle.alive()


def test_it_listens_on_loopback_only(one: Client) -> None:
    assert not listens_beyond_loopback(int(one.handle.url.rpartition(":")[2]))


def test_an_update_is_applied_once_however_often_it_is_asked_for(one: Client, next_step: int) -> None:
    first = one.update(next_step, batch())
    assert (first.applied, first.stepped, first.repeated) == (True, True, False)
    for name in ("loss/actor", "entropy", "clip_fraction", "grad_norm", "log_ratio/abs_mean", "ratio/max", "lr"):
        assert np.isfinite(first.metrics[name])
    digest, steps = one.publish(f"r/0/{next_step}").digest, one.describe().optimizer_steps
    again = one.update(next_step, batch())
    assert again.repeated
    assert dict(again.metrics) == dict(first.metrics)
    assert one.describe().optimizer_steps == steps
    assert one.publish(f"r/0/{next_step}").digest == digest


def test_callers_at_once_and_one_that_gave_up_make_one_step(one: Client, next_step: int) -> None:
    before = one.describe().optimizer_steps
    request = one.request(next_step, batch(200))
    code, _ = refused(lambda: one.stub.Update(request, timeout=0.02))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: one.stub.Update(request, timeout=CALL_S), range(4)))
    assert sum(not answer.repeated for answer in answers) <= 1
    assert one.describe().optimizer_steps == before + 1


def test_another_version_is_refused_with_both_named(one: Client, next_step: int) -> None:
    code, said = refused(lambda: one.update(next_step + 5, batch()))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"r/0/{next_step - 1}" in said
    assert f"r/0/{next_step + 4}" in said


def test_a_part_out_of_order_is_refused(one: Client, next_step: int) -> None:
    code, said = refused(lambda: one.update(next_step, batch(), part=3))
    assert code is grpc.StatusCode.ABORTED
    assert "expected part 0" in said


def test_what_cannot_be_trained_on_is_refused_by_name(one: Client, next_step: int) -> None:
    samples = batch()
    samples[2].response_ids = samples[2].response_ids + 1000
    code, said = refused(lambda: one.update(next_step, samples))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert samples[2].sample_id in said
    assert "vocabulary" in said
    code, said = refused(lambda: one.update(next_step, batch(), loss=pack_loss(LossSpec(policy_loss="ppo"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "ppo_clip" in said


def test_o34_a_batch_without_trained_tokens_moves_the_version_and_no_weight(one: Client, next_step: int) -> None:
    digest, steps = one.publish(f"r/0/{next_step - 1}").digest, one.describe().optimizer_steps
    masked = batch()
    for sample in masked:
        sample.loss_mask[:] = 0
    answer = one.update(next_step, masked)
    assert (answer.applied, answer.stepped) == (True, False)
    assert one.describe().policy_version == f"r/0/{next_step}"
    assert one.describe().optimizer_steps == steps
    assert one.publish(f"r/0/{next_step}").digest == digest


def test_parts_and_a_second_attempt_give_the_whole_batch_s_step(begin: Start) -> None:
    samples = batch()
    with begin(zero_stage=0) as client:
        client.update(1, samples)
        whole = client.weights("r/0/1")
        client.update(2, samples, part=0, final=False)
        client.update(2, samples[:2], part=0, final=False, attempt=1)
        client.update(2, samples[2:], part=1, attempt=1)
        parts = client.weights("r/0/2")
        state = client.describe()
    with begin(zero_stage=0) as client:
        client.update(1, samples[:4], part=0, final=False)
        client.update(1, samples[4:], part=1)
        first = client.weights("r/0/1")
        client.update(2, samples)
        second = client.weights("r/0/2")
    assert state.optimizer_steps == 2
    for name, tensor in whole.items():
        assert torch.allclose(first[name], tensor, atol=1e-6, rtol=0)
        assert torch.allclose(second[name], parts[name], atol=1e-6, rtol=0)


def test_a_publication_is_what_its_digest_and_its_probe_say(one: Client, next_step: int) -> None:
    one.update(next_step, batch())
    probe = probe_of(batch(5, seed=3))
    answer = one.publish(f"r/0/{next_step}", probe)
    info = codec.unpack(answer.update_info)
    path = one.store / info["path"]
    assert answer.backend == "safetensors"
    assert answer.digest == info["digest"] == blake3(path.read_bytes()).hexdigest()
    assert answer.bytes == info["bytes"] == path.stat().st_size
    assert 0 < answer.changed_fraction <= 1
    got, want = codec.unpack(answer.probe), one.log_probs(probe)
    assert [item["id"] for item in got] == [item["id"] for item in probe]
    for one_result, other in zip(got, want, strict=True):
        assert (one_result["logprobs"] == other["logprobs"]).all()


def test_o42_a_saved_state_goes_on_where_it_was(one: Client, next_step: int, tmp_path: Path) -> None:
    state, export = tmp_path / "trainer/global_step_1", tmp_path / "actor/global_step_1"
    before = one.describe()
    one.stub.Save(
        trainer_pb2.SaveRequest(state_dir=str(state), export_dir=str(export), manifest='{"cursor": 5}'), timeout=CALL_S
    )
    one.update(next_step, batch(seed=4))
    went_on = one.weights(f"r/0/{next_step}")
    answer = one.load(f"r/1/{next_step - 1}", str(state))
    assert json.loads(answer.manifest)["cursor"] == 5
    assert answer.optimizer_steps == before.optimizer_steps
    one.update(next_step, batch(seed=4), lineage=1)
    resumed = one.weights(f"r/1/{next_step}")
    for name, tensor in went_on.items():
        assert torch.equal(resumed[name], tensor)
    assert (export / "model.safetensors").is_file()
    assert (export / "tokenizer.json").is_file()
    # The tests after this one count in lineage 0.
    one.load(f"r/0/{next_step}", str(state))


def test_a_half_written_state_is_refused(one: Client, tmp_path: Path) -> None:
    code, said = refused(lambda: one.load("r/2/0", str(tmp_path)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "manifest.json" in said


def test_o14_two_ranks_make_the_steps_of_one(begin: Start, tmp_path: Path) -> None:
    ends, norms, orders = [], [], []
    for ranks, packed in ((1, False), (2, False), (2, True)):
        with begin(ranks=ranks, micro_batch_size=2, padding_free=packed) as client:
            norms.append([client.update(step, batch(7, seed=step)).metrics["grad_norm"] for step in (1, 2, 3)])
            ends.append(client.weights("r/0/3"))
            orders.append([item["id"] for item in client.log_probs(probe_of(batch(5)))])
            state = tmp_path / f"state{ranks}{packed}"
            client.stub.Save(trainer_pb2.SaveRequest(state_dir=str(state)), timeout=CALL_S)
            if ranks == 2:
                # A single sample leaves one rank without any. What an update will report can be asked for before it.
                before = client.loss("r/0/3", batch(1))["loss/actor"]
                made = client.update(4, batch(1))
                assert made.stepped
                assert made.metrics["loss/actor"] == pytest.approx(before, rel=1e-5, abs=1e-8)
                assert refused(lambda: client.loss("r/0/3", batch(1)))[0] is grpc.StatusCode.FAILED_PRECONDITION
                code, said = refused(lambda: client.load("r/1/3", str(tmp_path / "state1False")))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert "trainer.ranks" in said
                assert client.load("r/1/3", str(state)).optimizer_steps == 3
    for norm, order, end in zip(norms, orders, ends, strict=True):
        assert norm == pytest.approx(norms[0], rel=1e-5)
        assert order == [sample.sample_id for sample in batch(5)]
        for name, tensor in ends[0].items():
            assert torch.allclose(end[name], tensor, atol=1e-5, rtol=0)


def test_two_trainers_with_one_seed_are_bit_identical(begin: Start) -> None:
    digests = []
    for _ in range(2):
        with begin() as client:
            client.update(1, batch())
            client.update(2, batch(seed=1))
            digests.append(client.publish("r/0/2").digest)
    assert digests[0] == digests[1]


def test_a_killed_rank_is_named_within_seconds(begin: Start) -> None:
    with begin(ranks=2) as client:
        client.update(1, batch())
        os.kill(client.handle.pids[1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while client.handle.alive():
            assert time.monotonic() < deadline, "waited 60 s for the death of rank 1 to be noticed"
            time.sleep(0.1)
        assert "rank 1" in client.handle.failure()
        code, said = refused(lambda: client.update(2, batch()))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "rank 1" in said


def test_a_rank_killed_in_an_update_fails_the_running_call(begin: Start) -> None:
    with begin() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(refused, lambda: client.update(1, batch(4000)))
        time.sleep(0.5)
        os.kill(client.handle.pids[0], signal.SIGKILL)
        code, said = running.result(timeout=30)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "rank 0 died during accumulate" in said


def test_a_taken_port_and_a_missing_model_are_one_sentence(begin: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NightshiftError, match=rf"trainer\].*{port}.*taken"), begin(port=port):
            pass
    with pytest.raises(BadInputError, match=r"trainer\].*config\.json.*model\.path"), begin(path=tmp_path):
        pass


def test_a_stopped_trainer_leaves_no_process_and_no_shared_memory(begin: Start) -> None:
    with begin() as client:
        pids = client.handle.pids
        client.update(1, batch())
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"waited 60 s for processes {pids} to end"
        time.sleep(0.1)
    assert not list(Path("/dev/shm").glob("deepspeed*"))
