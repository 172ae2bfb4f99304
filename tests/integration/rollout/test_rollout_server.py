"""A real vLLM server with a tiny random model: ids in and out, log-probs, weight updates, the guard."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nightshift.config.job import JobSpec
from nightshift.wire.errors import BadInputError, RoleError
from nightshift.wire.events import EventLog
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.fleet import Fleet, Limits
from orchestrator.runner.health import PROBE_LIMITS
from orchestrator.runner.server import Proof
from orchestrator.runner.trainer import Publication
from services.rollout.keeper import descendants
from services.rollout.launch import VllmServer, port_is_free
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.integration

PROMPTS = [[1, 5, 6, 7, 8], [1, 40, 41], [1, 9, 9, 9, 10, 11, 12]]
TOKENS = 24


def spec_of(model: Path, **rollout) -> JobSpec:
    settings = {"kv_cache_gib": 0.05, "max_num_seqs": 8, "max_response_length": 180, "start_timeout_s": 240, **rollout}
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"path": str(model)},
            "data": {"train_files": ["unused.parquet"], "max_prompt_length": 64},
            "rewards": [{"function": "unused.py:reward"}],
            "rollout": settings,
        }
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("rollout")
    store = root / "store"
    store.mkdir()
    return root, store, build_tiny_model(root / "old", seed=0), build_tiny_model(root / "new", seed=1)


@pytest.fixture(scope="module")
def server(folders):
    root, store, old, _ = folders
    cores = sorted(os.sched_getaffinity(0))[:1]
    server = VllmServer(spec_of(old), store=store, log_path=root / "logs" / "rollout-0.log", cores=cores)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def http(server):
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def references(folders):
    _, _, old, new = folders
    return {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for name, path in (("old", old), ("new", new))
    }


def generate(http, prompt, request_id="r", **sampling):
    body = {
        "token_ids": prompt,
        "sampling_params": {
            "max_tokens": TOKENS,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
            "seed": 3,
            **sampling,
        },
    }
    answer = http.post("/inference/v1/generate", json=body, headers={"X-Request-Id": request_id})
    assert answer.status_code == 200, answer.text
    assert answer.json()["request_id"] == f"generate-tokens-{request_id}"
    choice = answer.json()["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]], choice["weight_versions"]


@torch.no_grad()
def teacher_forced(model, prompt, response, temperature=1.0):
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(response)), torch.tensor(response)].numpy()


def difference(http, model, temperature=1.0):
    worst = 0.0
    for prompt in PROMPTS:
        ids, logprobs, _ = generate(http, prompt, temperature=temperature)
        assert len(ids) == len(logprobs) == TOKENS
        worst = max(worst, np.abs(teacher_forced(model, prompt, ids, temperature) - logprobs).max())
    return worst


def describe(path: Path, store: Path) -> dict:
    return {
        "path": str(path.relative_to(store)),
        "bytes": path.stat().st_size,
        "digest": blake3(path.read_bytes()).hexdigest(),
    }


def publish(model: Path, store: Path, name: str) -> dict:
    tensors = load_file(model / "model.safetensors")
    save_file(tensors, store / name)
    return describe(store / name, store)


def push(http, info, version, expected=200):
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    try:
        assert http.post("/start_weight_update").status_code == 200
        answer = http.post("/update_weights", json={"update_info": info})
        assert answer.status_code == expected, answer.text
        if expected == 200:
            assert http.post("/finish_weight_update", json={"weight_version": version}).status_code == 200
    finally:
        # vLLM closes the connection after a 500, so that the next call needs a new one.
        for _ in range(2):
            try:
                assert http.post("/resume").status_code == 200
                break
            except httpx.TransportError:
                continue
    return answer.text


def test_the_log_probs_are_those_of_the_sampled_distribution(http, references):
    assert difference(http, references["old"]) < 1e-4
    assert difference(http, references["old"], temperature=0.7) < 1e-4
    assert difference(http, references["new"]) > 0.1  # the check can tell the two models apart


def test_new_weights_arrive_and_are_named_token_by_token(http, references, folders):
    _, store, old, new = folders
    assert http.post("/init_weight_transfer_engine", json={"init_info": {"root": str(store)}}).status_code == 200
    push(http, publish(new, store, "1.safetensors"), "run/0/1")
    assert http.get("/weight_info").json() == {"weight_version": "run/0/1"}
    assert difference(http, references["new"]) < 1e-4  # 0.1 off if the tied head kept its old packed copy
    assert generate(http, PROMPTS[0])[2] == [{"version": "run/0/1", "start": 0, "end": TOKENS}]
    push(http, publish(old, store, "2.safetensors"), "run/0/2")
    assert difference(http, references["old"]) < 1e-4


def test_a_running_request_goes_on_with_the_new_weights(http, references, folders):
    _, store, old, new = folders
    http.post("/init_weight_transfer_engine", json={"init_info": {}})
    files = {"old": publish(old, store, "old.safetensors"), "new": publish(new, store, "new.safetensors")}
    push(http, files["old"], "old-0")
    prompt = PROMPTS[1]
    # The request may end before the update begins: then there is nothing to see, and the next one is tried.
    for attempt in range(10):
        before, after = ("old", "new") if attempt % 2 == 0 else ("new", "old")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(generate, http, prompt, f"running-{attempt}", max_tokens=240)
            wait_for_running(http, answer)
            push(http, files[after], f"{after}-{attempt + 1}")
            ids, logprobs, spans = answer.result(60)
        assert [span["start"] for span in spans] == [0, *[span["end"] for span in spans[:-1]]]
        assert spans[-1]["end"] == len(ids) == 240
        if len(spans) == 2:
            break
    assert [span["version"] for span in spans] == [f"{before}-{attempt}", f"{after}-{attempt + 1}"]
    cut = spans[0]["end"]
    assert np.abs(teacher_forced(references[before], prompt, ids)[:cut] - logprobs[:cut]).max() < 1e-4
    assert np.abs(teacher_forced(references[after], prompt, ids)[cut:] - logprobs[cut:]).max() < 1e-4


def wait_for_running(http, answer):
    deadline = time.monotonic() + 60
    while not answer.done():
        lines = http.get("/metrics").text.splitlines()
        if any(line.startswith("vllm:num_requests_running") and line.endswith(" 1.0") for line in lines):
            return
        assert time.monotonic() < deadline, "the request never ran"


@pytest.mark.parametrize("damage", ["flipped byte", "cut short", "tensor missing", "outside", "absent"])
def test_a_bad_file_is_refused_and_the_server_stays_usable(http, references, folders, damage):
    root, store, old, new = folders
    http.post("/init_weight_transfer_engine", json={"init_info": {"root": str(store)}})
    push(http, publish(old, store, "good.safetensors"), "run/1/0")
    info = publish(new, store, "bad.safetensors")
    path = store / "bad.safetensors"
    if damage == "flipped byte":
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "tensor missing":
        save_file({k: v for k, v in load_file(path).items() if "layers.1.mlp.up" not in k}, path)
        info = describe(path, store)
    elif damage == "outside":
        shutil.copy(path, root / "elsewhere.safetensors")
        info = {**info, "path": "../elsewhere.safetensors"}
    else:
        path.unlink()
    push(http, info, "run/1/1", expected=500)
    assert http.get("/weight_info").json() == {"weight_version": "run/1/0"}
    assert difference(http, references["old"]) < 1e-4
    push(http, publish(new, store, "again.safetensors"), "run/1/2")
    assert difference(http, references["new"]) < 1e-4


def test_a_push_that_does_nothing_is_caught_by_the_probe(server, folders, references, tmp_path):
    _, store, old, new = folders
    probe = [
        SequenceInput(id=str(at), prompt_ids=np.array(ids[:2], np.int32), response_ids=np.array(ids[2:], np.int32))
        for at, ids in enumerate(PROMPTS)
    ]

    def publication(version: str, file: dict, model: str) -> Publication:
        values = [
            {"id": str(at), "logprobs": teacher_forced(references[model], ids[:2], ids[2:])}
            for at, ids in enumerate(PROMPTS)
        ]
        return Publication(version, "safetensors", file, file["digest"], file["bytes"], values, 1.0, 0.0)

    async def check() -> None:
        address = EngineAddress(server.name, server.url, server.token, server.incarnation)
        fleet = Fleet(
            [address], events=EventLog(tmp_path / "events.jsonl", "run"), refresh=lambda: [address],
            proof=Proof(probe, PROBE_LIMITS["float32"]), limits=Limits(request_timeout_s=60, away_s=5, retries=0),
        )  # fmt: skip
        files = {"old": publish(old, store, "a.safetensors"), "new": publish(new, store, "b.safetensors")}
        await fleet.publish(publication("run/0/0", files["old"], "old"))
        await fleet.publish(publication("run/0/1", files["new"], "new"))
        # The file of the weights that the server holds already, under the name of other ones.
        with pytest.raises(RoleError, match="does not compute with the weights of run/0/2"):
            await fleet.publish(publication("run/0/2", files["new"], "old"))
        await fleet.close()

    asyncio.run(check())


def test_a_store_outside_the_servers_own_is_refused(http, folders):
    root = folders[0]
    assert http.post("/init_weight_transfer_engine", json={"init_info": {"root": str(root)}}).status_code == 500
    http.close()


def test_the_guard_stands_before_every_route(server):
    open_client = httpx.Client(base_url=server.url, timeout=10, trust_env=False)
    with open_client as http:
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200
        assert http.get("/version").status_code == 200
        for path in (
            "/inference/v1/generate",
            "/pause",
            "/sleep",
            "/update_weights",
            "/collective_rpc",
            "/invocations",
        ):
            assert http.post(path, json={}).status_code == 401
        assert http.post("/pause", headers={"Authorization": "Bearer wrong"}).status_code == 401
        http.headers["Authorization"] = f"Bearer {server.token}"
        for path in ("/collective_rpc", "/invocations", "/v1/load_lora_adapter", "/tokenize", "//pause", "//sleep"):
            assert http.post(path, json={}).status_code == 403
        assert http.get("/v1/models").json()["data"][0]["id"] == "policy"
        assert http.get("/is_paused").json() == {"is_paused": False}


def test_all_processes_share_the_chosen_core(server):
    pids = [server.pid, *descendants(server.pid)]
    assert len(pids) >= 3
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            assert os.sched_getaffinity(int(task.name)) == {sorted(os.sched_getaffinity(0))[0]}


def test_a_taken_port_is_named_before_anything_starts(server, folders):
    root, store, old, _ = folders
    second = VllmServer(spec_of(old), store=store, log_path=root / "logs" / "second.log", port=server.port)
    with pytest.raises(BadInputError, match=rf"\[rollout\] port {server.port} is taken"):
        second.start()
    assert not (root / "logs" / "second.log").exists()


def test_a_flag_that_vllm_does_not_know_is_named(folders):
    root, store, old, _ = folders
    spec = spec_of(old, extra_args=["--no-such-flag"])
    server = VllmServer(spec, store=store, log_path=root / "logs" / "flag.log")
    with pytest.raises(RoleError, match=r"--no-such-flag"):
        server.start()
    assert not server.alive()


def test_stop_leaves_no_process_and_no_port(folders):
    """Also when the server's own processes were killed, or the one that started it: see the last lines."""
    root, store, old, _ = folders
    script = (
        "import sys, time; from pathlib import Path; from nightshift.config.job import JobSpec\n"
        "from services.rollout.launch import VllmServer\n"
        "spec = JobSpec.model_validate_json(sys.argv[1])\n"
        f"server = VllmServer(spec, store=Path({str(store)!r}), log_path=Path({str(root / 'logs' / 'child.log')!r}))\n"
        "server.start(); print(server.pid, server.port, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, spec_of(old).model_dump_json()], stdout=subprocess.PIPE, text=True
    )
    try:
        pid, port = map(int, parent.stdout.readline().split())
        pids = [pid, *descendants(pid)]
        assert len(pids) >= 3
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 40
    while any(Path(f"/proc/{p}").exists() for p in pids):
        assert time.monotonic() < deadline, "processes outlived the one that started them"
        time.sleep(0.2)
    assert port_is_free(port)


def test_a_lost_engine_is_noticed_while_a_request_is_open(server, http):
    """The last test of this server. An API server whose engine was killed waits for open requests before it ends."""
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        headers = {"Authorization": f"Bearer {server.token}"}
        body = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 4}}
        url = f"{server.url}/inference/v1/generate"
        pool.submit(httpx.post, url, json=body, headers=headers, timeout=90, trust_env=False)
        time.sleep(1.0)  # the request is queued behind the pause; nothing says when
        engine = next(p for p in descendants(server.pid) if "EngineCore" in Path(f"/proc/{p}/cmdline").read_text())
        os.kill(engine, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while server.answers() and server.alive():
            assert time.monotonic() < deadline, "the loss of the engine was not noticed"
            time.sleep(0.3)
        assert "engine" in str(server.failure()) or "ended" in str(server.failure())
        server.stop()
