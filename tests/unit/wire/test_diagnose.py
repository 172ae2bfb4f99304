"""Error texts as the libraries write them, and the one sentence that each becomes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.diagnose import RULES, diagnose, translate
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError, RoleTimeoutError

TEXTS = [
    (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.10 GiB "
        "of which "
        "1.20 GiB is free. Including non-PyTorch memory, this process has 77.00 GiB memory in use.",
        "gpu_memory",
        "ran out of memory on GPU 1: 2.50 GiB more were asked for, 1.20 GiB of 79.10 GiB were free",
    ),
    ("RuntimeError: CUDA error: out of memory", "gpu_memory", "ran out of memory"),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried "
        "to allocate 8000000000000 bytes. Error code 12 (Cannot allocate memory)",
        "memory",
        "ran out of memory",
    ),
    ("MemoryError: ", "memory", "ran out of memory"),
    (
        "OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node was 15.2GB / "
        "16.0GB",
        "memory_monitor",
        "was ended by Ray because the node ran low on memory",
    ),
    (
        "DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, "
        "OpType=ALLREDUCE, "
        "NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
        "nccl_timeout",
        "waited 600 s for the other ranks in ALLREDUCE (NCCL)",
    ),
    (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms "
        "for recv "
        "operation to complete",
        "gloo_timeout",
        "waited 1800 s for another rank to recv (gloo)",
    ),
    (
        "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "rendezvous",
        "waited 601 s for all ranks to join, 1/2 did",
    ),
    (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        "[127.0.0.1]:41231",
        "gloo_closed",
        "lost another rank (127.0.0.1) in a collective (gloo)",
    ),
    (
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error, NCCL version 2.27.5",
        "nccl",
        "had an NCCL failure: unhandled system error",
    ),
    (
        "RuntimeError: ncclRemoteError: A call failed possibly due to a network error",
        "nccl",
        "had an NCCL failure: ncclRemoteError",
    ),
    (
        "ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: "
        "RankActor\n\tactor_id: 0a\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker "
        "unexpectedly exits with a connection error code 2. End of file.",
        "actor_died",
        "lost its Ray actor RankActor (SYSTEM_ERROR)",
    ),
    (
        "RayActorError: The actor died because of an error raised in its creation task",
        "actor_died_plainly",
        "lost its Ray actor",
    ),
    (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "device",
        "got tensors on two devices, cuda:0 and cpu",
    ),
    ("RuntimeError: expected scalar type Half but found Float", "dtype", "got Float values where Half ones are needed"),
    (
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "dtype",
        "multiplied Float with BFloat16",
    ),
    (
        "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
        "dtype",
        "multiplied float with BFloat16",
    ),
    (
        "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for lm_head.weight: "
        "copying a "
        "param with shape torch.Size([49152, 576]) from checkpoint, the shape in current model is "
        "torch.Size([32000, 576]).",
        "weights",
        "was given weights of another model: lm_head.weight is [49152, 576], the model has [32000, 576]",
    ),
    (
        "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
        "shape",
        "combined tensors of 3 and 4 entries in dimension 1",
    ),
    (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        "shape",
        "multiplied matrices of 2x3 and 4x5",
    ),
    (
        "RuntimeError: shape '[2, 3]' is invalid for input of size 5",
        "shape",
        "could not bring 5 values into the shape [2, 3]",
    ),
    ("IndexError: index out of range in self", "token_id", "looked up a token id that its model does not have"),
    (
        "AcceleratorError: CUDA error: an illegal memory access was encountered",
        "gpu_fault",
        "had a fault of its GPU: an illegal memory access was encountered",
    ),
    ("OSError: [Errno 28] No space left on device: 'model.safetensors'", "disk_full", "found no room on the disk"),
    ("OSError: [Errno 24] Too many open files", "open_files", "may open no more files or connections"),
    ("ConnectError: All connection attempts failed", "http_refused", "found nobody at the address that it called"),
    ("ReadTimeout: ", "http_timeout", "had no answer in time over HTTP"),
    (
        "RemoteProtocolError: Server disconnected without sending a response.",
        "http_closed",
        "lost its HTTP connection in the middle of an answer",
    ),
    (
        "HTTPStatusError: Client error '401 Unauthorized' for url 'http://vllm:8000/pause'",
        "http_status",
        "was refused with HTTP 401 by http://vllm:8000/pause",
    ),
    (
        "HTTPStatusError: Server error '503 Service Unavailable' for url 'http://vllm:8000/pause'",
        "http_status",
        "was answered HTTP 503 (Service Unavailable) by http://vllm:8000/pause",
    ),
    ("ModuleNotFoundError: No module named 'flash_attn.ops'", "module", "lacks the Python module flash_attn.ops"),
]


@pytest.mark.parametrize(("text", "kind", "what"), TEXTS, ids=[f"{kind}-{at}" for at, (_, kind, _) in enumerate(TEXTS)])
def test_a_text_becomes_a_sentence(text: str, kind: str, what: str) -> None:
    found = diagnose(text)
    assert found is not None
    assert (found.kind, found.what) == (kind, what)
    assert found.fix
    assert not found.fix.endswith(".")


def test_every_rule_has_a_text() -> None:
    assert {rule.kind for rule in RULES} == {kind for _, kind, _ in TEXTS}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: reward is no number",
        "KeyError: 'answer'",
        "RuntimeError: the policy is memory efficient",
        "404",
    ],
)
def test_what_no_rule_knows_stays_unknown(text: str) -> None:
    assert diagnose(text) is None


@given(st.text(max_size=200), st.sampled_from(["", "trainer", "rollout", "reward"]))
def test_no_text_breaks_it(text: str, role: str) -> None:
    found = diagnose(text, role)
    assert found is None or found.what


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("trainer", "trainer.micro_batch_size"),
        ("rollout", "rollout.kv_cache_gib"),
        ("reference", "scorers.reference.micro_batch_size"),
        ("agent", "Free memory"),
    ],
)
def test_the_fix_is_that_of_the_role(role: str, says: str) -> None:
    found = diagnose("CUDA out of memory", role)
    assert found is not None
    assert says in found.fix


def raised(inner: BaseException, outer: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as error:
            raise outer from error
    except BaseException as error:
        return error


def test_the_root_of_a_chain_is_translated_and_names_its_part() -> None:
    error = raised(RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB."), RuntimeError("the step failed"))
    found = translate(error, role="trainer", subject="rank 3")
    assert str(found) == (
        "[trainer] rank 3 ran out of memory: 1.00 GiB more were asked for. Lower trainer.micro_batch_size, or set "
        "trainer.gradient_checkpointing"
    )
    assert type(found) is RoleError


def test_an_error_of_ours_stays_as_it_is_also_within_a_chain() -> None:
    ours = BadInputError("the file is missing", role="data")
    assert translate(ours, role="trainer") is ours
    assert translate(raised(ours, RuntimeError("the actor failed")), role="trainer") is ours


def test_a_ray_tasks_own_error_is_its_cause() -> None:
    class TaskError(Exception):
        cause = RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")

    found = translate(TaskError("traceback of another process"), role="trainer", subject="rank 0")
    assert "rank 0 multiplied matrices of 2x3 and 4x5" in str(found)


def test_waiting_in_vain_is_a_time_out() -> None:
    error = RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete")
    assert isinstance(translate(error, role="trainer"), RoleTimeoutError)


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("x is 3\nand more"), "ValueError: x is 3"), (KeyError(), "KeyError")]
)
def test_an_unknown_error_keeps_its_own_words(error: Exception, text: str) -> None:
    found: NightshiftError = translate(error, role="reward", subject="sample g1.0")
    assert found.message == f"sample g1.0: {text}"
    assert translate(error, role="reward").message == text


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = RuntimeError("round")
    error.__cause__ = error
    assert translate(error, role="trainer").message == "RuntimeError: round"
