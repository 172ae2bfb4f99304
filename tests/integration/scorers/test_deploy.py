"""The scorers on a real Ray Serve, called as the orchestrator calls them."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from ray import serve
from transformers import LlamaForCausalLM

from nightshift.wire import codec
from nightshift.wire.trace import TraceContext
from nightshift.wire.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc
from services.scorers import deploy, ingress
from services.scorers.states import state_of
from tests.fixtures.otlp_receiver import attributes_of, otlp_receiver

pytestmark = pytest.mark.integration

RUN = "scorers-20260101-000000-abcd"
REWARDS = """
import os, time

def length(response):
    print("the reward prints")
    return {"score": len(response), "pid": os.getpid(), "parent": os.getppid()}

async def match(response, ground_truth):
    if response == "hang":
        time.sleep(3600)
    if response == "text":
        return "0.7"
    return response == ground_truth
"""


@pytest.fixture(scope="module")
def receiver():
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def spec(make_spec, tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return make_spec(
        {"function": f"{path}:length"},
        {"function": f"{path}:match", "name": "exact match", "timeout_s": 1.0, "workers": 1},
        {"type": "grpc", "url": "grpc://127.0.0.1:9", "name": "elsewhere"},
    )


@pytest.fixture(scope="module")
def services(cluster, port, spec, receiver):
    yield deploy.deploy(spec, port, receiver.url, RUN)
    deploy.undeploy()


class Caller:
    """One channel, with the context of a caller's span."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = scorer_pb2_grpc.ScorerServiceStub(self.channel)
        self.trace = TraceContext.new()

    async def score(self, application: str, samples, seconds: float = 30.0, linked=()):
        context = common_pb2.Context(
            run_id=RUN, traceparent=self.trace.traceparent, policy_version=f"{RUN}/0/3", job_trace_id="1" * 32
        )
        data = samples if isinstance(samples, bytes) else codec.pack(samples)
        metadata = (("application", application), ("traceparent", self.trace.traceparent))
        request = scorer_pb2.ScoreRequest(context=context, samples=data, linked=["broken", *linked])
        response = await self.stub.Score(request, timeout=seconds, metadata=metadata)
        return codec.unpack(response.results), response

    async def refused(self, application: str, samples) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.score(application, samples)
        return caught.value


@pytest.fixture
async def caller(services, port):
    caller = Caller(port)
    yield caller
    await caller.channel.close()


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except FileNotFoundError:
            return False
    return pid == ancestor


def links_of(folder: Path) -> set[str]:
    links = set()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            links.add(str(path.readlink()))
    return links


def command_line(pid: int) -> bytes:
    """Of a running process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def ours_named(name: bytes) -> list[int]:
    """Processes below this one whose command line has a name."""
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in everyone if name in command_line(pid) and is_below(pid, os.getpid())]


def rewards_of(*responses: str) -> list:
    return [
        {
            "id": f"g.{index}",
            "prompt": [{"role": "user", "content": "say it"}],
            "response": response,
            "response_ids": np.array([1, 2], np.int32),
            "ground_truth": "yes",
            "data_source": None,
            "extra_info": None,
            "finish_reason": "stop",
        }
        for index, response in enumerate(responses)
    ]


def test_the_places_are_those_of_services_json(services, port):
    url = f"grpc://127.0.0.1:{port}"
    assert services == {
        "rewards": [
            {"name": "length", "url": url, "application": "reward-length"},
            {"name": "exact match", "url": url, "application": "reward-exact_match"},
            {"name": "elsewhere", "url": "grpc://127.0.0.1:9", "application": "reward-elsewhere"},
        ],
        "reference": {"url": url, "application": "reference"},
        "critic": None,
        "teacher": None,
    }


def test_o48_the_port_listens_on_loopback_only(services, port):
    assert not ingress.listens_beyond_loopback(port)
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        assert ingress.listens_beyond_loopback(open_to_all.getsockname()[1])


def test_o48_no_process_of_ray_or_serve_listens_beyond_loopback(services):
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and set(local.partition(":")[0]) == {"0"}:
                inodes.add(f"socket:[{inode}]")
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    ours = [pid for pid in pids if is_below(pid, os.getpid())]
    assert len(ours) > 8  # Ray's own processes, the controller, the proxy and three replicas
    assert not [command_line(pid) for pid in ours if inodes & links_of(Path(f"/proc/{pid}/fd"))]


async def test_rewards_come_back_in_order_with_their_memory(caller):
    results, response = await caller.score("reward-length", rewards_of("a", "bbb", ""))
    assert [(result["id"], result["score"]) for result in results] == [("g.0", 1.0), ("g.1", 3.0), ("g.2", 0.0)]
    assert 50e6 < response.peak_memory_bytes < 2e9
    assert 0 < response.seconds < 30


async def test_user_code_runs_in_a_worker_and_never_in_the_replica(caller):
    results, _ = await caller.score("reward-length", rewards_of("a"))
    pid, parent = (int(results[0]["parts"][key]) for key in ("pid", "parent"))
    assert b"services.scorers.reward_worker" in command_line(pid)
    assert b"ServeReplica" in command_line(parent)


async def test_o35_a_hanging_sample_is_unscored_and_the_others_are_not(caller):
    began = time.monotonic()
    results, _ = await caller.score("reward-exact_match", rewards_of("yes", "hang", "no", "text"))
    assert time.monotonic() - began < 60, "what sleeps for an hour held up the batch"
    assert [result["score"] for result in results] == [1.0, None, 0.0, None]
    assert [result["error_type"] for result in results] == ["", "timeout", "", "type"]


async def test_reference_log_probs_are_the_models(caller, model_folder):
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    samples = [
        {"id": "a", "prompt_ids": np.array([1, 5, 6], np.int32), "response_ids": np.array([7, 8], np.int32)},
        {"id": "b", "prompt_ids": np.array([9], np.int32), "response_ids": np.array([3, 3, 4], np.int32)},
    ]
    results, _ = await caller.score("reference", [{**sample, "temperature": 0.7} for sample in samples])
    for sample, result in zip(samples, results, strict=True):
        prompt, response = sample["prompt_ids"].tolist(), sample["response_ids"].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = torch.log_softmax(logits, -1)[torch.arange(len(response)), response]
        assert result["id"] == sample["id"]
        np.testing.assert_array_equal(result["token_ids"], sample["response_ids"])
        np.testing.assert_allclose(result["logprobs"], expected.numpy(), atol=1e-5)
    seen = {tensor.pop("name"): tensor for tensor in results[0]["tensors"]}
    assert set(seen) == {"input_ids", "attention_mask", "logits"}
    assert (seen["logits"]["shape"][-1], seen["logits"]["dtype"], seen["logits"]["device"]) == (97, "float32", "cpu")
    assert all("tensors" not in result for result in results[1:]), "once a call"


async def test_each_call_is_a_span_below_the_callers(caller, receiver):
    other = TraceContext.new()
    await caller.score("reward-length", rewards_of("a", "b"), linked=[other.traceparent])
    await caller.score("reference", [{"id": "a", "prompt_ids": [1], "response_ids": [2]}])
    spans = {span.name: (resource, span) for resource, span in receiver.wait_for(caller.trace.trace_id, 2)}
    assert set(spans) == {"reward.score", "reference.log_probs"}
    (link,) = spans["reward.score"][1].links
    assert (link.trace_id.hex(), link.span_id.hex()) == (other.trace_id, other.span_id)
    for name, role, samples in [("reward.score", "reward", 2), ("reference.log_probs", "reference", 1)]:
        resource, span = spans[name]
        assert resource["service.name"] == f"nightshift.{role}"
        assert span.parent_span_id.hex() == caller.trace.span_id
        attributes = attributes_of(span)
        assert attributes["nightshift.run_id"] == RUN
        assert attributes["nightshift.policy_version"] == f"{RUN}/0/3"
        assert attributes["nightshift.samples"] == samples


async def test_describe_says_what_answers(caller, model_folder):
    described = {}
    for application in ("reward-length", "reference"):
        metadata = (("application", application),)
        described[application] = await caller.stub.Describe(scorer_pb2.DescribeRequest(), timeout=30, metadata=metadata)
    assert described["reward-length"].role == "reward"
    assert described["reward-length"].model.endswith("rewards.py:length")
    reference = described["reference"]
    assert (reference.role, reference.model, reference.dtype) == ("reference", model_folder, "float32")
    assert reference.vocab_size == 97
    assert len(reference.incarnation) == 32
    assert reference.incarnation != described["reward-length"].incarnation


async def test_an_unknown_application_is_not_found(caller):
    assert (await caller.refused("reward-none", rewards_of("a"))).code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("application", "samples", "words"),
    [
        ("reward-length", b"\xc1", "[reward] cannot decode message of 1 bytes"),
        ("reward-length", {"id": "a"}, "[reward] expected a list of samples, got dict"),
        ("reward-length", [3], "[reward] sample 0 is a int, expected a map"),
        ("reward-length", [{"id": "a"}], "[reward] sample 0: 'response' is NoneType, expected a text"),
        (
            "reference",
            [{"id": "a", "prompt_ids": [], "response_ids": [1]}],
            "[reference] sample a: prompt_ids is empty",
        ),
        (
            "reference",
            [{"id": "a", "prompt_ids": [1], "response_ids": [97]}],
            "[reference] sample a: response_ids holds",
        ),
    ],
)
async def test_a_malformed_request_is_an_invalid_argument(caller, application, samples, words):
    error = await caller.refused(application, samples)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
    assert "\n" not in error.details()


async def test_many_calls_at_once_are_all_answered(caller):
    calls = [caller.score("reward-length", rewards_of("a" * n, "b")) for n in range(40)]
    answers = await asyncio.gather(*calls)
    assert [results[0]["score"] for results, _ in answers] == [float(n) for n in range(40)]


async def test_a_scorer_that_is_deployed_anew_fails_no_call(caller, spec, port):
    """As KubeRay does it where a RayService's configuration changes: a new replica, while calls go on."""
    metadata = (("application", "reward-length"),)

    async def incarnation() -> str:
        return (await caller.stub.Describe(scorer_pb2.DescribeRequest(), timeout=60, metadata=metadata)).incarnation

    before, scores, enough = await incarnation(), [], asyncio.Event()

    async def ask() -> None:
        while not enough.is_set():
            results, _ = await caller.score("reward-length", rewards_of("abc"), seconds=120)
            scores.append(results[0]["score"])

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    try:
        application = deploy._reward(spec, spec.rewards[0], "reward-length", None, RUN)
        await asyncio.to_thread(deploy._run, [application], port, 120.0)
        end = time.monotonic() + 120
        while await incarnation() == before:
            assert time.monotonic() < end, "no new replica answered within 120 s"
            await asyncio.sleep(0.2)
    finally:
        enough.set()
        answered = await asyncio.gather(*asking, return_exceptions=True)
    assert answered == [None] * 4, "a call failed"
    assert set(scores) == {3.0}


async def test_a_killed_replica_is_back_for_a_later_call_and_leaves_no_worker(caller):
    metadata = (("application", "reward-length"),)
    before = (await caller.stub.Describe(scorer_pb2.DescribeRequest(), timeout=30, metadata=metadata)).incarnation
    results, _ = await caller.score("reward-length", rewards_of("a"))
    worker, replica = (int(results[0]["parts"][key]) for key in ("pid", "parent"))
    os.kill(replica, signal.SIGKILL)
    end = time.monotonic() + 60
    while True:
        try:
            results, _ = await caller.score("reward-length", rewards_of("abc"), seconds=10)
            break
        except grpc.aio.AioRpcError:
            assert time.monotonic() < end, "the replica did not come back within 60 s"
            await asyncio.sleep(0.5)
    assert results[0]["score"] == 3.0
    after = (await caller.stub.Describe(scorer_pb2.DescribeRequest(), timeout=30, metadata=metadata)).incarnation
    assert after != before
    assert not command_line(worker)


@pytest.mark.parametrize("pause_s", [0.5, 1.5])
async def test_a_replica_killed_while_serves_controller_is_new_comes_back(caller, pause_s):
    """Serve calls it failed where it dies before the controller, which was just replaced, has seen it well."""
    results, _ = await caller.score("reward-length", rewards_of("a"), seconds=120)
    replica = int(results[0]["parts"]["parent"])
    (controller,) = ours_named(b"ServeController")
    os.kill(controller, signal.SIGKILL)
    await asyncio.sleep(pause_s)
    os.kill(replica, signal.SIGKILL)
    states, end = [], time.monotonic() + 120
    while not states or states[-1] != ("ready", ""):
        assert time.monotonic() < end, f"the replica did not come back within 120 s: {states[-3:]}"
        with contextlib.suppress(Exception):  # Serve raises many types while its controller is away
            known = await asyncio.wait_for(asyncio.to_thread(lambda: serve.status().applications), 30)
            states.append(state_of(known.get("reward-length")))
        await asyncio.sleep(0.2)
        with contextlib.suppress(grpc.aio.AioRpcError):
            results, _ = await caller.score("reward-length", rewards_of("abc"), seconds=5)
            if int(results[0]["parts"]["parent"]) == replica:
                states.clear()  # what was said of the one before
    assert "failed" not in {state for state, _ in states}
    results, _ = await caller.score("reward-length", rewards_of("abc"), seconds=60)
    assert results[0]["score"] == 3.0
    assert int(results[0]["parts"]["parent"]) != replica
