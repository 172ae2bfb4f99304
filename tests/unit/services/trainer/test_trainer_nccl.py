"""Communicators with servers, on a library that is not there: deadlines, failures, and what is given up."""

from __future__ import annotations

import base64
import ctypes
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from nightshift.wire.errors import RoleError, RoleTimeoutError
from services.trainer.links import Links, open_store
from services.trainer.nccl import UNIQUE_ID_BYTES, NcclLibrary, NcclLink

ID = bytes(range(UNIQUE_ID_BYTES))


class FakeNccl:
    """A library whose calls come to their end after some questions.

    Args:
        questions: for the progress of each call; None: it never ends.
        result: of each call at its end.
    """

    def __init__(self, questions: int | None = 2, result: int = 0) -> None:
        self.questions, self.result = questions, result
        self.calls: list[tuple[Any, ...]] = []
        self.aborted: list[int] = []
        self.never = threading.Event()
        self.stuck = False  # whether giving up hangs
        self._left = 0

    def unique_id(self) -> bytes:
        return ID

    def begin(self, world: int, unique_id: bytes) -> tuple[int, int]:
        assert unique_id == ID
        return self._call("begin", world), 7

    def state(self, communicator: int) -> int:
        self._left -= 1
        return 7 if self.questions is None or self._left > 0 else self.result

    def broadcast(self, tensor: torch.Tensor, communicator: int, stream: int) -> int:
        return self._call("broadcast", *tensor.tolist())

    def all_reduce(self, tensor: torch.Tensor, communicator: int, stream: int) -> int:
        return self._call("all_reduce", *tensor.tolist())

    def abort(self, communicator: int) -> None:
        self.aborted.append(communicator)
        if self.stuck:
            self.never.wait(30)

    def text(self, result: int) -> str:
        return f"error {result}"

    def _call(self, name: str, *values: Any) -> int:
        self.calls.append((name, *values))
        self._left = self.questions or 0
        return 0 if self.questions == 0 and not self.result else 7


class FakeQueue:
    handle = 1

    def __init__(self, done: Callable[[], bool] = lambda: True) -> None:
        self.done = done

    def within(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def one(self) -> torch.Tensor:
        return torch.zeros(1)

    def mark(self) -> Callable[[], bool]:
        return self.done


TENSORS = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]


@pytest.mark.parametrize("questions", [0, 3])
def test_a_link_joins_with_a_sum_and_sends_each_tensor_in_order(questions: int) -> None:
    nccl = FakeNccl(questions)
    link = NcclLink(nccl, FakeQueue(), "rollout-0", 3)
    link.join(30.0)
    link.send(TENSORS, 30.0)
    link.send(TENSORS[:1], 30.0)
    sent = [("broadcast", 1.0), ("broadcast", 2.0, 3.0), ("broadcast", 1.0)]
    assert nccl.calls == [("begin", 3), ("all_reduce", 0.0), *sent]
    assert nccl.aborted == []
    link.close()
    assert nccl.aborted == [7]
    with pytest.raises(RoleError, match="there is no NCCL communicator with rollout-0"):
        link.send(TENSORS, 30.0)


def test_a_server_that_never_joins_is_given_up() -> None:
    nccl = FakeNccl(None)
    link = NcclLink(nccl, FakeQueue(), "rollout-0", 2)
    with pytest.raises(RoleTimeoutError, match="rollout-0 did not join the trainer's NCCL communicator in time"):
        link.join(0.05)
    assert nccl.aborted == [7]


def test_a_server_that_dies_within_a_transfer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, queue = FakeNccl(), FakeQueue()
    link = NcclLink(nccl, queue, "rollout-0", 2)
    link.join(30.0)
    queue.done = lambda: False  # the kernel waits for its peer
    with pytest.raises(
        RoleTimeoutError, match=r"rollout-0 did not take the weights by NCCL in time, which is given up$"
    ):
        link.send(TENSORS, 0.05)
    assert nccl.aborted == [7]
    monkeypatch.setattr("services.trainer.nccl._ABORT_S", 0.05)
    nccl.stuck = True
    other = NcclLink(nccl, queue, "rollout-1", 2)
    with pytest.raises(RoleTimeoutError, match="a kernel of it still runs on the trainer's device"):
        other.join(0.05)
    nccl.never.set()


def test_an_error_of_nccl_names_the_server_and_what_it_means() -> None:
    nccl = FakeNccl(2, result=5)
    with pytest.raises(RoleError, match="rollout-0 could not join the trainer's NCCL communicator: error 5"):
        NcclLink(nccl, FakeQueue(), "rollout-0", 2).join(30.0)
    assert nccl.aborted == [7]


def test_what_is_under_way_ends_when_its_link_is_closed_from_elsewhere() -> None:
    nccl = FakeNccl(None)
    link = NcclLink(nccl, FakeQueue(), "rollout-0", 2)
    closer = threading.Thread(target=lambda: (wait(lambda: bool(nccl.calls)), link.close()))
    closer.start()
    with pytest.raises(RoleError, match="its communicator was closed"):
        link.join(60.0)
    closer.join(30)
    assert nccl.aborted == [7]


def test_where_there_is_no_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "libnothing-of-the-kind.so")
    with pytest.raises(RoleError, match=r"NCCL cannot be loaded: libnothing-of-the-kind\.so"):
        NcclLibrary()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Links by server ------------------------------------------------------------------------------------------------------


def made(nccl: FakeNccl) -> Links:
    return Links(lambda server, world: NcclLink(nccl, FakeQueue(), server, world), "127.0.0.1")


def test_each_server_has_a_link_of_its_own_and_a_new_one_takes_its_place() -> None:
    nccl = FakeNccl()
    links = made(nccl)
    info = links.open("rollout-0", 2, False)
    assert info == {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": base64.b64encode(ID).decode()}
    links.open("rollout-1", 3, False)
    for server in ("rollout-0", "rollout-1"):
        links.join(server, 30.0)
    links.open("rollout-0", 2, False)
    assert nccl.aborted == [7]  # the first one of rollout-0
    links.send("rollout-1", TENSORS, 30.0)
    links.drop("rollout-1")
    assert nccl.aborted == [7, 7]
    with pytest.raises(RoleError, match="no NCCL communicator with rollout-1 is open"):
        links.send("rollout-1", TENSORS, 30.0)


def test_a_link_that_failed_is_gone() -> None:
    nccl = FakeNccl(None)
    links = made(nccl)
    links.open("rollout-0", 2, False)
    with pytest.raises(RoleTimeoutError):
        links.join("rollout-0", 0.05)
    with pytest.raises(RoleError, match="no NCCL communicator with rollout-0 is open"):
        links.send("rollout-0", TENSORS, 30.0)


def test_workers_of_older_versions_find_the_id_in_a_store_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.26 does: a client of the store, and an object of a class of its own."""

    class Id(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)

    name = "vllm.distributed.device_communicators.pynccl_wrapper"
    module = ModuleType(name)
    module.ncclUniqueId = Id  # type: ignore[attr-defined]
    for parent in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    info = made(FakeNccl()).open("rollout-0", 2, True)
    assert (info["master_address"], info["rank_offset"], info["world_size"]) == ("127.0.0.1", 1, 2)
    links = made(FakeNccl())
    info = links.open("rollout-0", 2, True)
    client = TCPStore(
        info["master_address"],
        info["master_port"],
        world_size=2,
        is_master=False,
        timeout=timedelta(seconds=30),
        use_libuv=False,
    )
    found = pickle.loads(client.get("broadcast_from/0/0"))  # noqa: S301  # as vLLM does
    assert isinstance(found, Id)
    assert bytes(found) == ID


def test_a_store_listens_where_the_servers_are() -> None:
    for host, everywhere in (("127.0.0.1", False), ("gpu-7", True)):
        store, port = open_store(host, ID)
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        listeners = [line[1] for line in lines if line[3] == "0A"]
        assert (f"00000000:{port:04X}" in listeners) is everywhere
        assert (f"0100007F:{port:04X}" in listeners) is not everywhere
        del store
