"""A rank as a Ray actor: a process with its environment set before torch is loaded."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nightshift.gpu import visible_names
from nightshift.wire import codec
from nightshift.wire.diagnose import diagnose, translate
from nightshift.wire.errors import NightshiftError, RoleError
from nightshift.wire.experience import unpack_loss, unpack_samples
from services.trainer.config import RankConfig

if TYPE_CHECKING:
    from services.trainer.rank import TrainerRank
    from services.trainer.store import Publication
    from services.trainer.sums import PartSums

#: JSON list of the CPU cores that the ranks share out among them.
CORES_VARIABLE = "NIGHTSHIFT_TRAINER_CORES"


def environment(config: RankConfig, rank: int, world: int) -> dict[str, str]:
    """Variables of a rank's process, for the moment of its start: the C library and OpenMP read them then."""
    values = {
        "DS_ACCELERATOR": config.device,
        "RANK": str(rank),
        "LOCAL_RANK": "0" if config.device == "cuda" else str(rank),  # Ray shows a rank its own GPU only
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": str(config.threads),
        "MKL_NUM_THREADS": str(config.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.deterministic:
        values["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic matrix products ask for
    if config.compiles:
        values["TORCHINDUCTOR_COMPILE_THREADS"] = "4"  # processes, by default one for each core
    if config.gpus:
        # Its own device, and to rank 0 those that weights are published to. Ray counts devices and chooses none.
        seen = config.seen_gpus(rank)
        values["CUDA_VISIBLE_DEVICES"] = ",".join(visible_names(seen, os.environ.get("CUDA_VISIBLE_DEVICES")))
        values["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    if config.device == "cpu":
        values |= {
            # Threads that spin while they wait take the core from whoever they wait for.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
            # Large blocks stay with the process: handing them back costs hundreds of thousands of page faults a step.
            "MALLOC_MMAP_THRESHOLD_": "17179869184",
            "MALLOC_TRIM_THRESHOLD_": "17179869184",
            "MALLOC_TOP_PAD_": "268435456",
        }
    cores = os.environ.get(CORES_VARIABLE)
    return values | ({CORES_VARIABLE: cores} if cores else {})


class RankActor:
    """What the coordinator calls. Every method runs on all ranks in the same order."""

    def __init__(self, config: RankConfig, rank: int, world: int) -> None:
        self._config = config
        self._number = rank
        self._world = world
        self._held: TrainerRank | None = None
        # By default whoever started Ray says which cores these are; the processes of torch inherit them.
        pin(core_share(json.loads(os.environ.get(CORES_VARIABLE, "[]")), rank, world, config.threads))

    @property
    def _rank(self) -> TrainerRank:
        if self._held is None:
            raise RoleError(f"rank {self._number} was not set up", role="trainer")
        return self._held

    def place(self) -> tuple[str, str, int, int]:
        """Node id and address of this process, a free port there, and its process id."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return ray.get_runtime_context().get_node_id(), address, probe.getsockname()[1], os.getpid()

    def setup(self, init_method: str | None, loopback: bool) -> dict[str, object]:
        """Joins the other ranks and loads the model; returns what the trainer says of itself."""
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        with self._translated():
            if self._config.role == "critic":
                from services.trainer.critic import CriticRank as Rank
            else:
                from services.trainer.rank import TrainerRank as Rank

            self._held = Rank(self._config, self._number, self._world, init_method)
        return self._rank.describe()

    def ping(self) -> int:
        """Proves that the process lives."""
        return self._number

    def accumulate(self, samples: bytes, loss: bytes, loss_divisor: float, discard: bool) -> PartSums:
        """Adds a part's gradient; see :meth:`TrainerRank.accumulate`."""
        with self._translated():
            if discard:
                self._rank.discard()
            return self._rank.accumulate(unpack_samples(samples), unpack_loss(loss), loss_divisor)

    def evaluate(self, samples: bytes, loss: bytes) -> PartSums:
        """A part's sums, without its gradient; see :meth:`TrainerRank.evaluate`."""
        with self._translated():
            return self._rank.evaluate(unpack_samples(samples), unpack_loss(loss))

    def apply(self, divisor: float, learning_rate: float) -> dict[str, float]:
        """Makes the optimiser step; see :meth:`TrainerRank.apply`."""
        with self._translated():
            return self._rank.apply(divisor, learning_rate)

    def discard(self) -> None:
        """Forgets the accumulated gradient."""
        with self._translated():
            self._rank.discard()

    def log_probs(self, sequences: bytes, exact: bool) -> bytes:
        """Log-probs of this rank's share; see :meth:`TrainerRank.log_probs`."""
        with self._translated():
            return codec.pack(self._rank.log_probs(codec.unpack(sequences), exact))

    def publish(self, store: str) -> Publication | None:
        """Writes the weights into the store."""
        with self._translated():
            return self._rank.publish(Path(store))

    def open_link(self, server: str, world: int, by_store: bool) -> dict[str, Any]:
        """Opens a link with a server; see :meth:`Links.open`. This and the next three run beside all other calls."""
        return self._rank.links.open(server, world, by_store)

    def join_link(self, server: str, timeout_s: float) -> None:
        """Waits until the server has joined its link."""
        self._rank.links.join(server, timeout_s)

    def send_weights(self, server: str, timeout_s: float) -> None:
        """Sends the published weights over it."""
        self._rank.send_weights(server, timeout_s)

    def drop_link(self, server: str) -> None:
        """Gives it up."""
        self._rank.links.drop(server)

    def save_state(self, folder: str) -> None:
        """Writes this rank's part of a resume state."""
        with self._translated():
            self._rank.save_state(Path(folder))

    def load_state(self, folder: str) -> int:
        """Loads a resume state; returns the optimiser steps it had made."""
        with self._translated():
            self._rank.load_state(Path(folder))
            return self._rank.optimizer_steps

    def export(self, folder: str, dtype: str | None) -> None:
        """Writes an HF folder."""
        with self._translated():
            self._rank.export(Path(folder), dtype)

    def tensors(self) -> list[dict[str, Any]]:
        """The tensors of the last part; see :meth:`TrainerRank.tensors`."""
        return self._rank.tensors()

    def peak_memory(self) -> int:
        """Highest resident memory of the process in bytes."""
        return self._rank.peak_memory()

    def _translated(self) -> _Translated:
        return _Translated(self._number)


class _Translated:
    """Turns what torch raises into the project's errors, with the rank's number."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, NightshiftError):
            return
        found = diagnose(f"{type(error).__name__}: {error}")
        # Of what torch raises, only this leaves a rank that can go on; the coordinator translates the rest.
        if found is not None and found.kind in ("gpu_memory", "memory"):
            raise translate(error, role="trainer", subject=f"rank {self._rank}") from error


def core_share(cores: Sequence[int], rank: int, world: int, threads: int) -> list[int]:
    """The cores of one rank: its own where there are enough for all, else all of them."""
    if len(cores) >= world * threads:
        return list(cores[rank * threads : (rank + 1) * threads])
    return list(cores)


def pin(cores: Sequence[int]) -> None:
    """Binds every thread of this process, and what it starts later, to these cores; none: leaves it as it is."""
    if not cores:
        return
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue
