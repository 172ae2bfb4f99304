"""Where the fake engine takes weights from: a folder, or a link over which a fake trainer sends them, as NCCL does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Source(Protocol):
    """Of weights."""

    async def take(self, update_info: dict[str, Any]) -> np.ndarray: ...


class Folder:
    """Files."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def take(self, update_info: dict[str, Any]) -> np.ndarray:
        """Reads one."""
        found: np.ndarray = np.load(self._root / str(update_info["path"]), allow_pickle=False)
        return found


class FakeLink:
    """A trainer's and an engine's: what is done over it, both do at once."""

    def __init__(self) -> None:
        self.weights = np.zeros(0)
        self._both = asyncio.Barrier(2)

    async def meet(self) -> None:
        """Waits for the other end."""
        await self._both.wait()

    async def take(self, update_info: dict[str, Any]) -> np.ndarray:
        """Receives what the trainer sends."""
        await self.meet()
        return self.weights.copy()


#: By what the engine is told of one: its id, or the port of a store.
LINKS: dict[str, FakeLink] = {}


async def source(init_info: dict[str, Any], store: Path) -> Source:
    """What an engine takes weights from, once it was told."""
    name = init_info.get("nccl_unique_id_b64") or init_info.get("master_port")
    if name is None:
        return Folder(Path(init_info.get("root", store)))  # of whoever has it now
    link = LINKS[name]
    await link.meet()
    return link
