"""The folder of published weights. No torch: the coordinator reads what the ranks answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Publications that stay in the store: the one in use, and the one that a server may be reading.
KEPT = 2


@dataclass(frozen=True, slots=True)
class Publication:
    """Published weights."""

    update_info: dict[str, Any]  # body of vLLM's update_info
    digest: str  # BLAKE3 of the file, hex; "" for weights that stay on the device
    bytes: int
    changed_fraction: float  # of parameters that differ from the previous publication; 1.0 for the first
    backend: str = "safetensors"  # or "ipc" or "nccl"

    @property
    def name(self) -> str:
        """The file below the store, of backend "safetensors"."""
        return str(self.update_info["path"])


def published(store: Path) -> list[int]:
    """Numbers of the files in the store, in numeric order."""
    return sorted(int(path.stem) for path in store.glob("*.safetensors") if path.stem.isdigit())
