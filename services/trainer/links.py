"""Who the trainer's first rank has communicators with, and how a server's workers come to join one."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore

from nightshift.wire.errors import RoleError
from nightshift.wire.listen import LOOPBACK

#: Where vLLM's workers look for the id of their communicator in a store, and for how long.
_STORE_KEY, _STORE_S = "broadcast_from/0/0", 300
#: The module of vLLM whose class the id is, as its workers unpickle it.
_ID_CLASS = b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"


class Link(Protocol):
    """What is needed of :class:`services.trainer.nccl.NcclLink`."""

    unique_id: bytes

    def join(self, timeout_s: float) -> None: ...
    def send(self, tensors: Iterable[Tensor], timeout_s: float) -> None: ...
    def close(self) -> None: ...


class Links:
    """Links by server. A server that fails, restarts or joins has no part in those of the others.

    A link that failed is gone: another one must be opened. Calls come from several threads, one for each server.

    Args:
        make: makes the link with a server, given its name and the number of processes.
        host: name or address under which the servers reach this process.
    """

    def __init__(self, make: Callable[[str, int], Link], host: str) -> None:
        self._make = make
        self._host = host
        self._links: dict[str, Link] = {}
        self._stores: dict[str, TCPStore] = {}
        self._lock = threading.Lock()

    def open(self, server: str, world: int, by_store: bool) -> dict[str, Any]:
        """Opens a link, in place of the one that there was.

        Args:
            world: processes of it, this one included.
            by_store: whether the workers ask a store for its id, as vLLM's before 0.32; else it is sent to them.

        Returns:
            vLLM's ``init_info``.
        """
        self.drop(server)
        link = self._make(server, world)
        info: dict[str, Any] = {"rank_offset": 1, "world_size": world}
        if by_store:
            store, port = open_store(self._host, link.unique_id)
            info |= {"master_address": self._host, "master_port": port}
        else:
            store, info["nccl_unique_id_b64"] = None, base64.b64encode(link.unique_id).decode()
        with self._lock:
            self._links[server] = link
            if store is not None:
                self._stores[server] = store
        return info

    def join(self, server: str, timeout_s: float) -> None:
        """Waits until the server's workers have joined; see :meth:`NcclLink.join`."""
        self._with(server, lambda link: link.join(timeout_s))
        with self._lock:
            self._stores.pop(server, None)

    def send(self, server: str, tensors: Iterable[Tensor], timeout_s: float) -> None:
        """Sends tensors to a server; see :meth:`NcclLink.send`."""
        self._with(server, lambda link: link.send(tensors, timeout_s))

    def drop(self, server: str) -> None:
        """Gives the link with a server up."""
        with self._lock:
            link = self._links.pop(server, None)
            self._stores.pop(server, None)
        if link is not None:
            link.close()

    def _with(self, server: str, work: Callable[[Link], None]) -> None:
        with self._lock:
            link = self._links.get(server)
        if link is None:
            raise RoleError(f"no NCCL communicator with {server} is open", role="rollout")
        try:
            work(link)
        except Exception:
            with self._lock:
                if self._links.get(server) is link:
                    del self._links[server]
                    self._stores.pop(server, None)
            link.close()
            raise


def open_store(host: str, unique_id: bytes) -> tuple[TCPStore, int]:
    """A store in which vLLM's workers find the id; it ends with its last reference.

    Args:
        host: under which they reach it; it listens there alone where that is loopback, else on all interfaces.

    Returns:
        The store, and its port.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1" if host in LOOPBACK else "", 0))
    listener.listen()
    port = int(listener.getsockname()[1])
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        use_libuv=False,  # the other implementation takes no listening socket
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=_STORE_S),
    )
    store.set(_STORE_KEY, pickled_id(unique_id))  # type: ignore[arg-type]  # bytes too
    return store, port


def pickled_id(unique_id: bytes) -> bytes:
    """An id as vLLM's workers unpickle it: a ctypes structure of theirs, whose class is not at hand here."""
    state = b"}C" + bytes([len(unique_id)]) + unique_id + b"\x86"  # (no attributes, the bytes)
    return b"\x80\x04c_ctypes\n_unpickle\n" + _ID_CLASS + state + b"\x86R."


def nccl_links(device: torch.device, host: str) -> Links:
    """Links by NCCL from a device.

    Raises:
        RoleError: NCCL cannot be loaded.
    """
    from services.trainer.nccl import CudaQueue, NcclLibrary, NcclLink

    library = NcclLibrary()
    return Links(lambda server, world: NcclLink(library, CudaQueue(device), server, world), host)
