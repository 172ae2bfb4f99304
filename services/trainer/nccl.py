"""NCCL between the trainer's first rank and the workers of one server, such that every wait has an end.

The library is called by ctypes: torch's own face of it has neither a way to give a communicator up nor one to wait for
a peer with a deadline. A communicator is non-blocking here: calls return at once, and their progress is asked for. One
that is given up is aborted, which also ends a kernel that waits on the device for a peer that never comes.

The form of a transfer is that of vLLM's "nccl" engine without packing, which versions 0.26 to 0.33 take alike: a sum of
one element after joining, then one broadcast a tensor from rank 0, in the order of ``update_info``.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from nightshift.wire.errors import RoleError, RoleTimeoutError

UNIQUE_ID_BYTES = 128
#: vLLM's variable for another library than the one that torch has loaded; both sides must have the same version.
LIBRARY_VARIABLE = "VLLM_NCCL_SO_PATH"
_SUCCESS, _IN_PROGRESS = 0, 7
_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SUM = 0
#: Of NCCL's configuration in the form of 2.14, which later versions read as well.
_MAGIC, _VERSION, _UNDEFINED = 0xCAFEBEEF, 21400, -(2**31)
#: Seconds between two questions for progress: few at first, since a broadcast begins within microseconds.
_QUICK, _PAUSE_S = 500, 0.0005
#: Longest time that giving up may take.
_ABORT_S = 10.0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
    )


class Nccl(Protocol):
    """What is used of the library. Calls return what NCCL returns: 0, 7 (in progress), or the number of an error."""

    def unique_id(self) -> bytes: ...
    def begin(self, world: int, unique_id: bytes) -> tuple[int, int]: ...
    def state(self, communicator: int) -> int: ...
    def broadcast(self, tensor: Tensor, communicator: int, stream: int) -> int: ...
    def all_reduce(self, tensor: Tensor, communicator: int, stream: int) -> int: ...
    def abort(self, communicator: int) -> None: ...
    def text(self, result: int) -> str: ...


class NcclLibrary:
    """The library.

    Raises:
        RoleError: it is not there.
    """

    def __init__(self) -> None:
        name = os.environ.get(LIBRARY_VARIABLE) or "libnccl.so.2"
        try:
            self._library: Any = ctypes.CDLL(name)
        except OSError as error:
            raise RoleError(
                f"NCCL cannot be loaded: {error}",
                role="trainer",
                fix=f"Set rollout.weight_transfer to auto, or {LIBRARY_VARIABLE} to the library",
            ) from error
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._library.ncclGetErrorString.restype = self._library.ncclGetLastError.restype = ctypes.c_char_p
        forms: dict[str, list[Any]] = {
            "ncclGetLastError": [pointer],
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRankConfig": [
                *(ctypes.POINTER(pointer), number, _UniqueId, number, ctypes.POINTER(_Config)),
            ],
            "ncclCommGetAsyncError": [pointer, ctypes.POINTER(number)],
            "ncclBroadcast": [pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer],
            "ncclAllReduce": [pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer],
            "ncclCommAbort": [pointer],
        }
        for function, arguments in forms.items():
            getattr(self._library, function).argtypes = arguments

    def unique_id(self) -> bytes:
        """A new id, of a communicator that this process is the first rank of."""
        made = _UniqueId()
        if result := self._library.ncclGetUniqueId(ctypes.byref(made)):
            raise RoleError(f"NCCL made no id: {self.text(result)}", role="trainer")
        return ctypes.string_at(ctypes.addressof(made), UNIQUE_ID_BYTES)

    def begin(self, world: int, unique_id: bytes) -> tuple[int, int]:
        """Begins to join as rank 0; what it returned, and the communicator."""
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _VERSION, 0, _UNDEFINED)
        given = _UniqueId.from_buffer_copy(unique_id)
        made = ctypes.c_void_p()
        result = self._library.ncclCommInitRankConfig(ctypes.byref(made), world, given, 0, ctypes.byref(config))
        return int(result), made.value or 0

    def state(self, communicator: int) -> int:
        """How far the last call is."""
        found = ctypes.c_int(_IN_PROGRESS)
        return int(self._library.ncclCommGetAsyncError(communicator, ctypes.byref(found)) or found.value)

    def broadcast(self, tensor: Tensor, communicator: int, stream: int) -> int:
        """Sends a contiguous tensor from rank 0, which this is."""
        at, kind = tensor.data_ptr(), _DTYPES[tensor.dtype]
        return int(self._library.ncclBroadcast(at, at, tensor.numel(), kind, 0, communicator, stream))

    def all_reduce(self, tensor: Tensor, communicator: int, stream: int) -> int:
        """Sums a contiguous tensor up over all ranks, in place."""
        at, kind = tensor.data_ptr(), _DTYPES[tensor.dtype]
        return int(self._library.ncclAllReduce(at, at, tensor.numel(), kind, _SUM, communicator, stream))

    def abort(self, communicator: int) -> None:
        """Gives a communicator up, whatever it is at."""
        self._library.ncclCommAbort(communicator)

    def text(self, result: int) -> str:
        """What a number means, with what NCCL last said of itself."""
        said = self._library.ncclGetLastError(None) or b""
        parts = [self._library.ncclGetErrorString(result), said]
        return "; ".join(part.decode(errors="replace").strip() for part in parts if part.strip())


class Queue(Protocol):
    """A stream of a device."""

    @property
    def handle(self) -> int: ...
    def within(self) -> AbstractContextManager[Any]: ...
    def one(self) -> Tensor: ...
    def mark(self) -> Callable[[], bool]: ...


class CudaQueue:
    """A CUDA stream beside those that train."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        """As NCCL takes it."""
        return int(self._stream.cuda_stream)

    def within(self) -> AbstractContextManager[Any]:
        """The stream and its device, for the calling thread."""
        return torch.cuda.stream(self._stream)

    def one(self) -> Tensor:
        """A tensor of one element."""
        return torch.zeros(1, device=self._device)

    def mark(self) -> Callable[[], bool]:
        """A question whether all that was queued until now is done."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return lambda: bool(event.query())


class NcclLink:
    """A communicator with the workers of one server.

    :meth:`join` and :meth:`send` are for one thread at a time, :meth:`close` for any.

    Args:
        server: its name.
        world: processes of the communicator, this one included.
    """

    def __init__(self, nccl: Nccl, queue: Queue, server: str, world: int) -> None:
        self.unique_id = nccl.unique_id()
        self._nccl = nccl
        self._queue = queue
        self._server = server
        self._world = world
        self._communicator = 0
        self._closing = threading.Event()
        self._working = threading.Lock()

    def join(self, timeout_s: float) -> None:
        """Waits until the server's workers are in the communicator.

        Raises:
            RoleTimeoutError: they did not come in time; the communicator is given up.
            RoleError: NCCL failed, or the communicator was closed.
        """
        what, end = "join the trainer's NCCL communicator", time.monotonic() + timeout_s
        with self._working, self._queue.within():
            result, self._communicator = self._nccl.begin(self._world, self.unique_id)
            self._settle(result, what, end)
            one = self._queue.one()
            self._settle(self._nccl.all_reduce(one, self._communicator, self._queue.handle), what, end)
            self._wait(self._queue.mark(), what, end)

    def send(self, tensors: Iterable[Tensor], timeout_s: float) -> None:
        """Sends tensors, in this order, to workers that receive the same.

        Raises:
            RoleTimeoutError: they did not take them in time; the communicator is given up.
            RoleError: NCCL failed, or the communicator was closed.
        """
        what, end = "take the weights by NCCL", time.monotonic() + timeout_s
        with self._working, self._queue.within():
            if not self._communicator:
                raise RoleError(f"there is no NCCL communicator with {self._server}", role="rollout")
            for tensor in tensors:
                self._settle(self._nccl.broadcast(tensor, self._communicator, self._queue.handle), what, end)
            self._wait(self._queue.mark(), what, end)

    def close(self) -> None:
        """Gives the communicator up; whoever is in :meth:`join` or :meth:`send` finds out there."""
        self._closing.set()
        if self._working.acquire(blocking=False):
            try:
                self._abort()
            finally:
                self._working.release()

    def _settle(self, result: int, what: str, end: float) -> None:
        """Waits until a call has been taken up."""
        if result == _IN_PROGRESS:

            def taken() -> bool:
                nonlocal result
                result = self._nccl.state(self._communicator)
                return result != _IN_PROGRESS

            self._wait(taken, what, end)
        if result != _SUCCESS:
            self._abort()
            raise RoleError(
                f"{self._server} could not {what}: {self._nccl.text(result)}",
                role="rollout",
                fix="Trainer and server need the same version of NCCL, a GPU each, and a network between them; "
                "NCCL_DEBUG=INFO tells more",
            )

    def _wait(self, done: Callable[[], bool], what: str, end: float) -> None:
        asked = 0
        while not done():
            asked += 1
            if self._closing.is_set():
                self._abort()
                raise RoleError(f"{self._server} was to {what}, and its communicator was closed", role="rollout")
            if time.monotonic() > end:
                still = "" if self._abort() else "; a kernel of it still runs on the trainer's device"
                raise RoleTimeoutError(
                    f"{self._server} did not {what} in time, which is given up{still}", role="rollout"
                )
            time.sleep(0 if asked < _QUICK else _PAUSE_S)

    def _abort(self) -> bool:
        """Gives the communicator up; whether NCCL has let go of it."""
        given_up, self._communicator = self._communicator, 0
        if not given_up:
            return True
        abort = threading.Thread(target=self._nccl.abort, args=(given_up,), name="abort of NCCL", daemon=True)
        abort.start()
        abort.join(_ABORT_S)
        return not abort.is_alive()
