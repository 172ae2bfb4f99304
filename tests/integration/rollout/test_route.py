"""The rollout route in a real vLLM server with a tiny random model, beside vLLM's own route."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM

from nightshift.config.job import JobSpec
from nightshift.wire.experience import VersionSpan
from nightshift.wire.rollout import INFO, ROUTE
from orchestrator.runner.answers import EngineAwayError, EngineRefusedError, Generated, GenerateRequest
from orchestrator.runner.capabilities import Capabilities
from orchestrator.runner.engine import Engine, EngineAddress
from orchestrator.runner.prefix import join, rest
from services.rollout.keeper import descendants
from services.rollout.launch import VllmServer
from tests.fixtures.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = [[1, 5, 6, 7, 8 + at] for at in range(12)]
TABLE = json.loads((Path(__file__).parents[2] / "fakes" / "vllm_routes.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    root = tmp_path_factory.mktemp("route")
    (root / "store").mkdir()
    return root, root / "store", build_tiny_model(root / "old", seed=0), build_tiny_model(root / "new", seed=1)


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path, Path, Path], receiver: OtlpReceiver) -> Iterator[VllmServer]:
    root, store, old, _ = folders
    spec = JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"path": str(old)},
            "data": {"train_files": ["unused.parquet"], "max_prompt_length": 64},
            "rewards": [{"function": "unused.py:reward"}],
            "rollout": {
                "kv_cache_gib": 0.05,
                "max_num_seqs": 8,
                "max_response_length": 180,
                "start_timeout_s": 240,
            },
        }
    )
    cores = sorted(os.sched_getaffinity(0))[:1]
    server = VllmServer(spec, store=store, log_path=root / "rollout-0.log", cores=cores, otlp=receiver.url)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def client_of(server: VllmServer, flush_tokens: int, store: Path | None = None) -> Engine:
    info = {"root": str(store)} if store else {}
    address = EngineAddress("rollout-0", server.url, server.token, server.incarnation, init_info=info)
    return Engine(address, 60.0, flush_tokens)


@pytest_asyncio.fixture(loop_scope="module")
async def ours(server: VllmServer) -> AsyncIterator[Engine]:
    engine = client_of(server, 8)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def whole(server: VllmServer) -> AsyncIterator[Engine]:
    engine = client_of(server, 0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def theirs(server: VllmServer) -> AsyncIterator[Engine]:
    """By vLLM's own route."""
    engine = client_of(server, 0)
    engine.capabilities = Capabilities("0.32", route=False)
    yield engine
    await engine.close()


def request(name: str, prompt: list[int] = PROMPTS[0], **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "stop_token_ids": (), "seed": 3}
    ids = np.array(prompt, np.int32)
    return GenerateRequest(request_id=name, prompt_ids=ids, **{**fields, "ignore_eos": True, **changes})


def same(one: Generated, other: Generated) -> None:
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert one.logprobs.tobytes() == other.logprobs.tobytes()  # bit for bit
    assert (one.versions, one.finish_reason) == (other.versions, other.finish_reason)


@torch.no_grad()
def teacher_forced(folder: Path, prompt: list[int], response: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt + response.tolist()])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)[torch.arange(len(response)), ids[0, len(prompt) :]].numpy()


def published(folder: Path, store: Path, name: str) -> dict[str, Any]:
    data = (folder / "model.safetensors").read_bytes()
    (store / name).write_bytes(data)
    return {"path": name, "bytes": len(data), "digest": blake3(data).hexdigest()}


# Equality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "seed": None},
        {"temperature": 0.7, "max_tokens": 1},
        {"max_tokens": 150},
        {"stop_token_ids": tuple(range(3, 60)), "min_tokens": 9, "ignore_eos": False},
        {"stop_token_ids": tuple(range(3, 60)), "ignore_eos": False},
    ],
)
async def test_both_routes_draw_the_same_bit_for_bit(
    ours: Engine, whole: Engine, theirs: Engine, changes: dict[str, Any]
) -> None:
    wanted = await theirs.generate(request("theirs", **changes))
    same(await ours.generate(request("ours", **changes)), wanted)
    same(await whole.generate(request("whole", **changes)), wanted)


async def test_concurrent_requests_draw_the_same_bit_for_bit(ours: Engine, whole: Engine, theirs: Engine) -> None:
    async def all_of(engine: Engine, name: str) -> list[Generated]:
        made = (
            engine.generate(request(f"{name}.{at}", prompt, seed=at, max_tokens=20 + 4 * at))
            for at, prompt in enumerate(PROMPTS)
        )
        return list(await asyncio.gather(*made))

    wanted = await all_of(theirs, "theirs")
    assert len({tuple(answer.response_ids) for answer in wanted}) == len(PROMPTS)
    for engine, name in ((ours, "ours"), (whole, "whole")):
        for made, answer in zip(await all_of(engine, name), wanted, strict=True):
            same(made, answer)


async def test_what_vllm_refuses_our_route_refuses(ours: Engine) -> None:
    for wrong in (
        request("long", [1] * 5000),
        request("unknown", [1_000_000]),
        request("least", min_tokens=30, max_tokens=20),
    ):
        with pytest.raises(EngineRefusedError, match="with 400"):
            await ours.generate(wrong)


async def test_the_info_names_this_server(server: VllmServer, ours: Engine) -> None:
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False) as http:
        info = (await http.get(INFO)).json()
    assert info["incarnation"] == server.incarnation
    # Only a GPU's memory can be given back, and only under a flag that we do not set here.
    assert [name for name, able in info["capabilities"].items() if not able] == ["sleep"]
    assert (await ours.connect()).route
    assert (await ours.connect()).vllm == info["vllm_version"]
    # The record of this version is what the server has; what is missing there is behind that flag.
    version = ".".join(info["vllm_version"].split("+")[0].split(".")[:3])
    assert set(TABLE[version]["routes"]) - set(info["routes"]) <= {"/sleep", "/wake_up", "/is_sleeping"}


async def test_the_guard_stands_before_our_routes(server: VllmServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        assert (await http.get(INFO)).status_code == 401
        assert (await http.post(ROUTE, content=b"")).status_code == 401
        assert (await http.post(ROUTE, headers={"Authorization": "Bearer wrong"})).status_code == 401
        http.headers["Authorization"] = f"Bearer {server.token}"
        assert (await http.post(ROUTE, content=b"")).status_code == 400
        assert (await http.get(ROUTE)).status_code == 405


async def test_the_span_of_a_request_belongs_to_its_sample(ours: Engine, receiver: OtlpReceiver) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await ours.generate(request("traced", traceparent=f"00-{trace}-{parent}-01"))
    ((_, span),) = await asyncio.to_thread(receiver.wait_for, trace)
    assert span.parent_span_id.hex() == parent


# Parts ----------------------------------------------------------------------------------------------------------------


async def test_a_push_below_a_request_gives_two_spans_with_the_right_boundary(
    server: VllmServer, folders: tuple[Path, Path, Path, Path]
) -> None:
    _, store, old, new = folders
    engine = client_of(server, 8, store)
    try:
        await engine.connect()
        await engine.init_transfer({"root": str(store)})
        files = {"old": published(old, store, "old.safetensors"), "new": published(new, store, "new.safetensors")}
        await engine.push(files["old"], "old/0/0")
        prompt = PROMPTS[1]
        # The request may end before the update begins: then there is nothing to see, and the next one is tried.
        for attempt in range(10):
            before, after = ("old", "new") if attempt % 2 == 0 else ("new", "old")
            drawing = asyncio.create_task(engine.generate(request(f"mixed-{attempt}", prompt, max_tokens=170)))
            await asyncio.sleep(0.1)
            await engine.push(files[after], f"{after}/0/{attempt + 1}")
            made = await drawing  # the client has compared our spans with vLLM's own
            if len(made.versions) == 2:
                break
        assert [span.version for span in made.versions] == [f"{before}/0/{attempt}", f"{after}/0/{attempt + 1}"]
        cut = made.versions[0].end
        models = {"old": old, "new": new}
        head = teacher_forced(models[before], prompt, made.response_ids) - made.logprobs
        tail = teacher_forced(models[after], prompt, made.response_ids) - made.logprobs
        assert np.abs(head[:cut]).max() < 1e-4
        assert np.abs(tail[cut:]).max() < 1e-4
        assert np.abs(head[cut:]).max() > 1e-2  # the two can be told apart
        await engine.push(files["old"], "old/1/0")
        assert await engine.weight_version() == "old/1/0"
    finally:
        await engine.close()


async def cached_tokens(engine: Engine) -> float:
    """Tokens of prompts that the server found in its prefix cache so far."""
    lines = (await engine._request("GET", "/metrics", timeout_s=5.0)).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


async def test_a_push_that_keeps_the_cache_gives_none_of_it_to_new_requests(
    server: VllmServer, folders: tuple[Path, Path, Path, Path]
) -> None:
    _, store, old, new = folders
    engine, models = client_of(server, 8, store), {"old": old, "new": new}
    prompt = [1, *(5 + at % 50 for at in range(139))]  # several blocks of the cache
    try:
        await engine.connect()
        await engine.init_transfer({"root": str(store)})
        files = {"old": published(old, store, "old.safetensors"), "new": published(new, store, "new.safetensors")}
        await engine.push(files["old"], "old/2/0")
        kept = False
        # The request may end before the update begins: then there is nothing to see, and the next one is tried.
        for attempt in range(10):
            before, after = ("old", "new") if attempt % 2 == 0 else ("new", "old")
            drawing = asyncio.create_task(engine.generate(request(f"kept-{attempt}", prompt, max_tokens=100)))
            await asyncio.sleep(0.1)
            await engine.push(files[after], f"{after}/2/{attempt + 1}", keep_cache=True)
            # The same prompt, by our route and by vLLM's own, while blocks of the earlier weights are still there.
            found = await cached_tokens(engine)
            ours = await engine.generate(request(f"ours-{attempt}", prompt, max_tokens=8))
            assert await cached_tokens(engine) == found
            await engine.generate(request(f"again-{attempt}", prompt, max_tokens=1))
            assert await cached_tokens(engine) > found  # requests after the push share blocks with each other
            body = {
                "token_ids": prompt,
                "sampling_params": {"max_tokens": 8, "logprobs": 0, "temperature": 1.0, "seed": 3, "ignore_eos": True},
            }
            choice = (await engine._call("POST", "/inference/v1/generate", body=body))["choices"][0]
            theirs = np.array(choice["token_ids"], np.int32)
            shown = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
            assert ours.versions == [VersionSpan(f"{after}/2/{attempt + 1}", 0, 8)]
            assert np.abs(teacher_forced(models[after], prompt, ours.response_ids) - ours.logprobs).max() < 1e-4
            assert np.abs(teacher_forced(models[after], prompt, theirs) - shown).max() < 1e-4
            assert np.abs(teacher_forced(models[before], prompt, theirs) - shown).max() > 1e-2  # can be told apart
            # What a server that computes with the weights must answer is asked of it after each push.
            scored = await engine.score(np.array(prompt, np.int32), ours.response_ids)
            assert np.abs(scored - ours.logprobs).max() < 1e-4
            made = await drawing
            if len(made.versions) == 2:
                kept = True
                break
        assert kept
        assert [span.version for span in made.versions] == [f"{before}/2/{attempt}", f"{after}/2/{attempt + 1}"]
        cut = made.versions[0].end
        head = teacher_forced(models[before], prompt, made.response_ids) - made.logprobs
        tail = teacher_forced(models[after], prompt, made.response_ids) - made.logprobs
        assert np.abs(head[:cut]).max() < 1e-4
        assert np.abs(head[cut:]).max() > 1e-2  # drawn by the new weights
        assert np.abs(tail[cut:]).max() > 1e-3  # upon keys and values of the old ones
        await engine.push(files["old"], "old/3/0")
    finally:
        await engine.close()


async def test_a_refused_file_leaves_the_tokens_below_it_without_a_version(
    server: VllmServer, folders: tuple[Path, Path, Path, Path]
) -> None:
    _, store, old, _ = folders
    engine = client_of(server, 8, store)
    try:
        await engine.init_transfer({"root": str(store)})
        await engine.push(published(old, store, "good.safetensors"), "run/2/0")
        with pytest.raises(EngineAwayError, match="/update_weights with 500"):
            await engine.push({"path": "absent.safetensors"}, "run/2/1")
        assert await engine.weight_version() == ""
        await engine.push(published(old, store, "good.safetensors"), "run/2/2")
        assert (await engine.generate(request("after"))).versions == [VersionSpan("run/2/2", 0, 24)]
    finally:
        await engine.close()


async def test_an_aborted_request_leaves_a_prefix_that_can_be_gone_on_from(ours: Engine, whole: Engine) -> None:
    """Greedy in float32: prefix and rest together are the response that was never interrupted."""
    settings = {"max_tokens": 170, "temperature": 0.0, "seed": None}
    plain = await whole.generate(request("plain", **settings))
    for attempt in range(10):
        wanted = request(f"aborted-{attempt}", **settings)
        drawing = asyncio.create_task(ours.generate(wanted))
        await asyncio.sleep(0.15)
        await ours._call("POST", "/abort_requests", body={"request_ids": [wanted.request_id]})
        try:
            await drawing
        except EngineAwayError as error:
            partial = error.partial
            break
    assert partial is not None
    tokens = len(partial.response_ids)
    assert 0 < tokens < 170
    assert partial.versions[-1].end == tokens
    made = join(partial, await ours.generate(rest(wanted, partial)))
    assert made.response_ids.tolist() == plain.response_ids.tolist()
    assert np.abs(made.logprobs - plain.logprobs).max() < 1e-4


async def test_a_client_that_goes_away_frees_its_place(server: VllmServer, ours: Engine) -> None:
    drawing = asyncio.create_task(ours.generate(request("gone", max_tokens=170)))
    await asyncio.sleep(0.1)
    drawing.cancel()
    await asyncio.gather(drawing, return_exceptions=True)
    for _ in range(100):
        metrics = (await ours._request("GET", "/metrics", timeout_s=5.0)).text.splitlines()
        running = [line for line in metrics if line.startswith("vllm:num_requests_running")]
        if all(line.endswith(" 0.0") for line in running):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still running: {running}")


async def drawn_tokens(engine: Engine) -> float:
    """Tokens that the server has drawn so far."""
    lines = (await engine._request("GET", "/metrics", timeout_s=30.0)).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


async def test_what_was_sent_outlives_the_server(server: VllmServer, ours: Engine) -> None:
    """The last test: it ends the server, which holds a response of which two parts have been sent."""
    for attempt in range(10):
        before = await drawn_tokens(ours)
        drawing = asyncio.create_task(ours.generate(request(f"lost-{attempt}", max_tokens=170)))
        while not drawing.done() and await drawn_tokens(ours) < before + 17:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await ours._call("POST", "/pause?mode=keep")
        await asyncio.sleep(0.5)  # what has left the server is read by then; it draws no more
        if not drawing.done():
            break
        await ours._call("POST", "/resume")  # the response ended before the pause: the next one is tried
    assert not drawing.done()
    for pid in descendants(server.pid):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineAwayError) as caught:
        await drawing
    partial = caught.value.partial
    assert partial is not None
    assert 16 <= len(partial.response_ids) < 170
    assert len(partial.response_ids) == len(partial.logprobs) == partial.versions[-1].end
