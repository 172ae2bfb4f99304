"""Publication of weights inside GPUs: a buffer on each device that has servers, which these map by CUDA IPC.

The buffer holds a copy, so that what a server reads stays as it was published while the next step changes the
parameters. It lies on the server's device, which need not be the trainer's: the copy crosses between the two then.
Each tensor has a handle for each device, by the device's UUID: a server takes that of its own, so that one
``update_info`` serves all of them. For NCCL there is one buffer, on the trainer's own device, from which each server
is sent the weights.
The form of ``update_info`` is that of vLLM's "ipc" engine without its ``packed`` flag, which versions 0.26 to 0.33 take
alike: one handle a tensor. All are views of one allocation a device, which a server opens once.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nightshift.wire.errors import RoleError
from services.trainer.policy import Policy
from services.trainer.publish import buckets, whole
from services.trainer.store import Publication

#: Tensors begin at multiples of so many elements (256 bytes or more), as allocations of their own would.
_ALIGNMENT = 128


class SharedWeights:
    """The buffer and its views.

    Args:
        policy: the trained module.
        dtype: precision in which the weights are published.
        devices: of the servers, each once.
        partitioned: whether the parameters are spread over the ranks (ZeRO stage 3).

    Raises:
        RoleError: a device has no room for its copy.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype, devices: Sequence[torch.device], partitioned: bool) -> None:
        self._policy = policy
        self._partitioned = partitioned
        self._published = False
        shapes = {
            name: _shape(parameter)
            for names, parameters in buckets(policy)
            for name, parameter in zip(names, parameters, strict=True)
        }
        offsets, end = [], 0
        for shape in shapes.values():
            offsets.append(end)
            end += math.ceil(math.prod(shape) / _ALIGNMENT) * _ALIGNMENT
        self._flats = [_buffer(end, dtype, device) for device in devices]
        self._flat = self._flats[0]
        self._views = {
            name: self._flat[offset : offset + math.prod(shape)].view(shape)
            for (name, shape), offset in zip(shapes.items(), offsets, strict=True)
        }
        self._offsets = dict(zip(shapes, offsets, strict=True))
        self._info: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the published tensors."""
        return sum(view.numel() * view.element_size() for view in self._views.values())

    def gather(self) -> None:
        """Takes part in gathering the parameters, on ranks of ZeRO stage 3 that publish nothing themselves."""
        for _, parameters in buckets(self._policy):
            with whole(parameters, self._partitioned):
                pass

    def publish(self, backend: str) -> Publication:
        """Copies the parameters in and says what they are, and for "ipc" where.

        Args:
            backend: "ipc" or "nccl". Handles stay valid until this object is gone.
        """
        changed = self.fill()
        if self._info is None:
            self._info = self._describe() | (self._handles() if backend == "ipc" else {})
        return Publication(self._info, "", self.bytes, changed, backend)

    def tensors(self) -> list[Tensor]:
        """What was published last, on the first device, in the order of its description."""
        return list(self._views.values())

    def fill(self) -> float:
        """Copies the parameters in.

        Returns:
            Share of the elements whose published value changed; 1 for the first publication.
        """
        changed = torch.zeros((), dtype=torch.int64, device=self._flat.device)
        for names, parameters in buckets(self._policy):
            with whole(parameters, self._partitioned), torch.no_grad():
                for name, parameter in zip(names, parameters, strict=True):
                    view = self._views[name]
                    value = parameter.detach().to(device=view.device, dtype=view.dtype)
                    changed += torch.count_nonzero(value != view)
                    view.copy_(value)
        share = float(changed) / max(1, sum(view.numel() for view in self._views.values()))
        for other in self._flats[1:]:
            other.copy_(self._flat, non_blocking=True)
        for flat in self._flats:
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)  # a reader in another process knows nothing of this stream
        first, self._published = not self._published, True
        return 1.0 if first else share

    def _describe(self) -> dict[str, Any]:
        """vLLM's ``update_info``."""
        return {
            "names": list(self._views),
            "dtype_names": [str(view.dtype).removeprefix("torch.") for view in self._views.values()],
            "shapes": [list(view.shape) for view in self._views.values()],
        }

    def _handles(self) -> dict[str, Any]:
        """What it says beyond that for "ipc"."""
        from torch.multiprocessing.reductions import reduce_tensor

        # Exported once: each export adds a layer of reference counting to the allocation that never goes away.
        exported = {
            str(torch.cuda.get_device_properties(flat.device).uuid): reduce_tensor(flat)[1] for flat in self._flats
        }
        handles = [
            {uuid: view_arguments(arguments, view, self._offsets[name]) for uuid, arguments in exported.items()}
            for name, view in self._views.items()
        ]
        return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}


def _buffer(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.zeros(elements, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise RoleError(
            f"there is no room on {device} for the published weights ({elements * dtype.itemsize >> 20} MiB)",
            role="trainer",
            fix="Lower rollout.kv_cache_gib or trainer.max_tokens_per_micro_batch",
        ) from error


def view_arguments(arguments: tuple[Any, ...], view: Tensor, offset: int) -> tuple[Any, ...]:
    """Arguments of torch's rebuild_cuda_tensor for a contiguous view, from those of the whole buffer.

    Args:
        arguments: those of the buffer: class, size, stride, offset in elements, and what names the allocation.
        view: of the buffer.
        offset: of the view's first element in the buffer.
    """
    kind, _, _, start, *allocation = arguments
    return (kind, view.size(), view.stride(), start + offset, *allocation)


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
