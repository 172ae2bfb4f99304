"""What this machine offers: device, CPU cores, room for published weights."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nightshift.config.job import JobSpec
from nightshift.config.resources import ResourcesConfig
from nightshift.gpu import Device, Placement, ask_driver, place
from nightshift.wire.errors import BadInputError
from services.rollout import weights

#: Where the trainer's ranks find their cores: a JSON list of core numbers.
TRAINER_CORES_VARIABLE = "NIGHTSHIFT_TRAINER_CORES"
#: Published files that lie in the weight store at once: the newest two, and the one that is being written.
_COPIES = 3
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU cores of the two roles that compute; empty: no pinning."""

    rollout: tuple[int, ...]
    trainer: tuple[int, ...]


def allot_gpus(spec: JobSpec, device: Device) -> Placement | None:
    """Which CUDA devices the roles have; None on a CPU.

    Raises:
        BadInputError: a device was asked for that is not there.
    """
    if device == "cpu":
        return None
    driver = ask_driver()
    return place(spec.resources, spec.trainer.ranks, len(driver.gpus) if driver else 0)


def allot_cores(resources: ResourcesConfig, device: Device, available: Sequence[int], servers: int = 1) -> Cores:
    """Which cores generation and training run on. On a CPU they never share one if there are two.

    Args:
        available: cores that this process may use.
        servers: rollout servers; each gets a core of its own as long as one is left for the trainer.

    Raises:
        BadInputError: a core was asked for that is not available.
    """
    cores = sorted(available)
    wanted = {"rollout_cores": resources.rollout_cores, "trainer_cores": resources.trainer_cores}
    for key, value in wanted.items():
        if value is not None and (missing := sorted(set(value) - set(cores))):
            raise BadInputError(
                f"resources.{key} names core {missing[0]}, which this process may not use",
                role="job",
                fix=f"Choose from {cores}",
            )
    if device == "cuda":
        return Cores(tuple(resources.rollout_cores or ()), tuple(resources.trainer_cores or ()))
    own = min(servers, max(1, len(cores) - 1))
    rollout = cores[:own] if resources.rollout_cores is None else resources.rollout_cores
    trainer = (cores[own : own + 1] or cores[:1]) if resources.trainer_cores is None else resources.trainer_cores
    return Cores(tuple(rollout), tuple(trainer))


def split_cores(cores: Sequence[int], servers: int) -> list[tuple[int, ...]]:
    """The cores of each server: neighbours, as evenly as it goes; one each, in turn, where there are fewer cores."""
    if len(cores) < servers:
        return [tuple(cores[at % len(cores) :][:1]) if cores else () for at in range(servers)]
    ends = [at * len(cores) // servers for at in range(servers + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(ends)]


def available_cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def check_store_room(spec: JobSpec, folder: Path) -> None:
    """Checks that the published weights will fit into the folder of the weight store.

    Raises:
        BadInputError: they will not.
    """
    shapes = weights.model_shapes(Path(spec.model.path))
    if shapes is None:
        return
    parameters = sum(math.prod(shape) for shape in shapes.values())
    sizes = [spec.rollout.dtype] * _COPIES
    if spec.rollout.own_servers and spec.rollout.weight_transfer == "http":
        # What each server has fetched, and what it is fetching.
        sizes += [spec.rollout.dtype] * 2 * spec.rollout.servers
    if spec.scorers.critic:
        sizes += [spec.scorers.critic.dtype] * _COPIES
    need = sum(parameters * (4 if dtype == "float32" else 2) for dtype in sizes)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise BadInputError(
            f"the weight store {folder} has {free // _MIB} MiB free, the published weights need {need // _MIB} MiB",
            role="trainer",
            fix="Set resources.weight_store to a folder with more room, or enlarge that file system",
        )
