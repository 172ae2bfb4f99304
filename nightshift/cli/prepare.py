"""Everything that ``run`` checks and makes before it starts a process of the run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nightshift.cli import processes
from nightshift.cli.estimate import read_shape
from nightshift.cli.gpu_memory import check_gpu_memory
from nightshift.cli.processes import RUN_ID_VARIABLE, Child
from nightshift.config import JobSpec
from nightshift.config.rewards import ClassifierReward, EmbeddingReward
from nightshift.config.scorers import REMOTE
from nightshift.gpu import ask_driver, find_device, place
from nightshift.sleep import check_sleep
from nightshift.transfer import check_nccl
from nightshift.wire.errors import BadInputError, NightshiftError, RoleTimeoutError

#: Longest time for fetching or making a model.
_MODEL_DEADLINE_S = 3600.0


def repository_root() -> Path | None:
    """The folder that holds ``orchestrator`` and ``services`` beside this package; None where it stands alone."""
    root = Path(__file__).resolve().parent.parent.parent
    return root if _has_rooms(root) else None


def check_installation() -> None:
    """Checks that the programs of a run are there.

    Raises:
        BadInputError: only the client was installed.
    """
    if repository_root() is None and not all(importlib.util.find_spec(name) for name in ("orchestrator", "services")):
        raise BadInputError(
            "this installation holds the client alone, and `run` needs the orchestrator and the services",
            fix="Install from the repository: make venv, or pip install -e . with the locks of requirements/",
        )


def environment(run_id: str = "", otlp_endpoint: str = "") -> dict[str, str]:
    """The environment of the children: ours, with the repository importable from any folder, and the run's id."""
    values = dict(os.environ)
    if root := repository_root():
        values["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), values.get("PYTHONPATH", "")]))
    values["PYTHONUNBUFFERED"] = "1"
    if run_id:
        values[RUN_ID_VARIABLE] = run_id
    if otlp_endpoint:
        values["NIGHTSHIFT_OTLP_ENDPOINT"] = otlp_endpoint
    return values


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module. ``-P``: a folder named like one of ours where the user stands is not imported."""
    return [sys.executable, "-P", "-m", name, *arguments]


def resolve_models(spec: JobSpec, say: Callable[[str], None]) -> None:
    """Replaces model names of the job by local folders, fetching or making what is not there.

    Raises:
        BadInputError: there is no such model.
        RoleTimeoutError: it took too long.
    """
    known: dict[str, str] = {}

    def local(name: str) -> str:
        if name not in known:
            known[name] = _resolve_model(name, say)
        return known[name]

    spec.model.path = local(spec.model.path)
    if spec.model.tokenizer is not None and not Path(spec.model.tokenizer).exists():
        spec.model.tokenizer = local(spec.model.tokenizer)
    reference = spec.scorers.reference.model
    if spec.needs_reference and reference is not None and not reference.startswith(REMOTE):
        spec.scorers.reference.model = local(reference)
    for reward in spec.rewards:
        if isinstance(reward, ClassifierReward | EmbeddingReward):
            reward.model = local(reward.model)
    teacher, critic = spec.scorers.teacher, spec.scorers.critic
    if spec.needs_teacher and teacher is not None and not teacher.model.startswith(REMOTE):
        teacher.model = local(teacher.model)
    if critic is not None and critic.model is not None:
        critic.model = local(critic.model)


def check_weight_store(spec: JobSpec) -> None:
    """Checks that published weights have a place.

    Raises:
        BadInputError: names the folder.
    """
    store = Path(spec.resources.weight_store)
    if not store.is_dir() or not os.access(store, os.W_OK):
        raise BadInputError(
            f"resources.weight_store {str(store)!r} is not a folder that can be written",
            role="job",
            fix="Set it to a folder in memory, or to any folder with room for two copies of the weights",
        )


def check_device(spec: JobSpec) -> None:
    """Checks that the job's device is there, and that its roles fit into it together.

    Raises:
        BadInputError: says what is wrong with the driver, or what would fit.
    """
    device = find_device(spec.resources.device)
    driver = ask_driver() if device == "cuda" else None
    placement = place(spec.resources, spec.trainer.ranks, len(driver.gpus)) if driver else None
    check_sleep(spec, device, placement)
    check_nccl(spec, placement)
    if driver is not None:
        check_gpu_memory(spec, read_shape(Path(spec.model.path)), driver.gpus)


def weight_store(spec: JobSpec, run_id: str) -> Path:
    """The folder of one run's published weights; the agent makes and removes it."""
    return Path(spec.resources.weight_store) / f"nightshift-{run_id}"


def _resolve_model(name: str, say: Callable[[str], None]) -> str:
    say(f"model: {name}")
    child = processes.start(
        "model",
        module("services.agent.models", name),
        environment=environment(),
        log=None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = child.process.communicate(timeout=_MODEL_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise RoleTimeoutError(
            f"{name!r} was not ready after {_MODEL_DEADLINE_S:.0f} s", role="model", fix="Fetch it by other means"
        ) from error
    finally:
        child.kill_group()
        child.process.wait()
    lines = out.decode(errors="replace").split("\n")
    folder = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if child.process.returncode == 0 and Path(folder).is_dir():
        return folder
    raise _model_error(name, child, err.decode(errors="replace"))


def _model_error(name: str, child: Child, output: str) -> NightshiftError:
    lines = [line for line in output.splitlines() if line.strip()]
    cause = lines[-1] if lines else f"ended with code {child.process.returncode}"
    text = cause if cause.startswith("[") else f"[model] {name}: {cause}"
    return BadInputError(text) if child.process.returncode == 2 else NightshiftError(text)


def _has_rooms(root: Path) -> bool:
    return all((root / room / "__init__.py").is_file() for room in ("orchestrator/runner", "services/agent"))
