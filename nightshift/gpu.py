"""The CUDA devices of this machine, found by asking the driver, and which role has which of them. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nightshift.config.resources import ResourcesConfig
from nightshift.wire.errors import BadInputError

Device = Literal["cpu", "cuda"]

#: CUDA major version -> first driver branch that runs programs built for it.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_QUERY = "index,uuid,name,memory.total,memory.free,driver_version"
_QUERY_S = 30.0
_MIB = 1 << 20
_CONTROL = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device that this process may use."""

    index: int  # as programs of this process count them
    uuid: str
    name: str
    memory: int  # bytes
    free: int  # bytes, at the time of the question


@dataclass(frozen=True, slots=True)
class Driver:
    """What the driver says."""

    version: str  # "" where it does not answer
    gpus: tuple[Gpu, ...]
    error: str = ""  # why it does not answer


@dataclass(frozen=True, slots=True)
class Placement:
    """CUDA devices by role."""

    rollout: int
    trainer: tuple[int, ...]  # by rank
    spare: tuple[int, ...] = field(default=(), compare=False)  # for further servers, beside the first one's

    @property
    def shared(self) -> bool:
        """Whether the server has a device together with the trainer."""
        return self.rollout in self.trainer

    def servers(self, count: int) -> list[int]:
        """The device of each server: one of its own as far as they go, then in turn."""
        devices = [self.rollout, *self.spare]
        return [devices[at % len(devices)] for at in range(count)]


def ask_driver() -> Driver | None:
    """The NVIDIA driver of this machine; None where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Driver("", (), "nvidia-smi is not on the PATH") if _CONTROL.exists() else None
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_QUERY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver("", (), f"nvidia-smi does not answer: {error}")
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return Driver("", (), said[-1] if said else f"nvidia-smi ended with code {done.returncode}")
    return parse_driver(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_driver(text: str, visible: str | None = None) -> Driver:
    """Reads the answer of nvidia-smi.

    Args:
        text: lines of index, uuid, name, memory in MiB, free memory in MiB, driver version.
        visible: CUDA_VISIBLE_DEVICES: indices or the beginnings of UUIDs, in the order in which programs count them.
    """
    version, found = "", []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 6 and fields[0].isdigit() and fields[3].isdigit() and fields[4].isdigit():
            version = fields[5]
            found.append(Gpu(int(fields[0]), fields[1], fields[2], int(fields[3]) * _MIB, int(fields[4]) * _MIB))
    if visible is not None:
        chosen = []
        for name in filter(None, (part.strip() for part in visible.split(","))):
            gpu = next(
                (g for g in found if str(g.index) == name or (not name.isdigit() and g.uuid.startswith(name))), None
            )
            if gpu is None:
                break  # CUDA too ignores what follows a device that is not there
            chosen.append(gpu)
        found = chosen
    gpus = tuple(Gpu(at, gpu.uuid, gpu.name, gpu.memory, gpu.free) for at, gpu in enumerate(found))
    return Driver(version, gpus)


def visible_names(indices: Sequence[int], visible: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES of a child must say, so that it sees these devices, counted as this process does.

    Args:
        indices: of the devices.
        visible: CUDA_VISIBLE_DEVICES of this process.
    """
    names = [name.strip() for name in visible.split(",")] if visible else []
    return [names[index] if index < len(names) else str(index) for index in indices]


def cuda_of_torch() -> int | None:
    """Major CUDA version that the installed torch was built for; 0: none; None: it does not say."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if match := re.search(r"\+cu(\d\d)", version):
        return int(match[1])
    if "+cpu" in version:
        return 0
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        try:
            return int(importlib.metadata.version(name).partition(".")[0])
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
    return None


def why_not_cuda(driver: Driver | None, cuda: int | None) -> tuple[str, str]:
    """Why CUDA cannot be used here, and what to do; two empty texts where it can.

    Args:
        driver: what the driver says; None: there is none.
        cuda: major version that torch was built for; 0: none, None: unknown.
    """
    if driver is None:
        return "there is no NVIDIA driver", "Install one, or set resources.device to cpu"
    if driver.error or not driver.gpus:
        return driver.error or "the NVIDIA driver shows no device", "Look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    if cuda == 0:
        return (
            "the installed torch is built for the CPU",
            "Install requirements/gpu.txt, or set resources.device to cpu",
        )
    oldest = _OLDEST_DRIVER.get(cuda or 0)
    branch = driver.version.partition(".")[0]
    if oldest is not None and branch.isdigit() and int(branch) < oldest:
        return (
            f"the NVIDIA driver {driver.version} is too old for the installed torch (CUDA {cuda}), which needs "
            f"{oldest} or newer",
            "Update the driver, install a torch for an older CUDA, or set resources.device to cpu",
        )
    return "", ""


def choose_device(wanted: str, driver: Driver | None, cuda: int | None) -> Device:
    """The device of a job.

    "auto" is CUDA where the driver answers and torch is built for it. A driver that is too old is an error then, not
    a reason to compute on the CPU without a word.

    Raises:
        BadInputError: "cuda" is asked for, or found, and cannot be used.
    """
    if wanted == "cpu" or (wanted == "auto" and (driver is None or cuda == 0 or not (driver.gpus or driver.error))):
        return "cpu"
    cause, fix = why_not_cuda(driver, cuda)
    if cause:
        raise BadInputError(f"resources.device is {wanted}, but {cause}", role="job", fix=fix)
    return "cuda"


def find_device(wanted: str) -> Device:
    """:func:`choose_device` for this machine.

    Raises:
        BadInputError: as there.
    """
    return "cpu" if wanted == "cpu" else choose_device(wanted, ask_driver(), cuda_of_torch())


def place(resources: ResourcesConfig, ranks: int, gpus: int) -> Placement:
    """Which CUDA devices the roles have: one of its own for the server where there are enough, else a shared one.

    Args:
        ranks: of the trainer.
        gpus: devices of this machine.

    Raises:
        BadInputError: a device was asked for that is not there, or there are fewer than ranks.
    """
    trainer = tuple(resources.trainer_gpus if resources.trainer_gpus is not None else range(ranks))
    if len(trainer) != ranks or len(set(trainer)) != ranks or (resources.trainer_gpus is None and ranks > gpus):
        raise BadInputError(
            f"trainer.ranks is {ranks}, for which there are {gpus if resources.trainer_gpus is None else len(trainer)} "
            "CUDA device(s): each rank needs one of its own",
            role="job",
            fix="Lower trainer.ranks, or correct resources.trainer_gpus",
        )
    free = [gpu for gpu in range(gpus) if gpu not in trainer]
    rollout = resources.rollout_gpu if resources.rollout_gpu is not None else (free or list(trainer))[0]
    for key, index in (("rollout_gpu", rollout), *(("trainer_gpus", gpu) for gpu in trainer)):
        if not 0 <= index < gpus:
            raise BadInputError(
                f"resources.{key} names CUDA device {index}, but this machine has {gpus}",
                role="job",
                fix=f"Choose from 0 to {gpus - 1}",
            )
    spare = tuple(gpu for gpu in free if gpu != rollout) if resources.rollout_gpu is None else ()
    return Placement(rollout, trainer, spare)
