"""``nightshift plan``: what a job will need, found out without starting anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nightshift.cli.estimate import ModelShape, estimate, kv_tokens, read_shape
from nightshift.cli.output import EXIT_DONE, mib, print_json, waiting
from nightshift.compat.loading import load_any
from nightshift.config import JobSpec
from nightshift.config.files import is_remote

_BUILTIN = "builtin:"


def local_model(name: str) -> Path | None:
    """The folder of a model that is on this machine already: given, made before, or in the HF cache; else None."""
    if name.startswith(_BUILTIN):
        cache = Path(os.environ.get("NIGHTSHIFT_CACHE") or "~/.cache/nightshift").expanduser() / "models"
        return next((f for f in sorted(cache.glob(f"{name.removeprefix(_BUILTIN)}*")) if _is_model(f)), None)
    if is_remote(name):
        return None
    if _is_model(folder := Path(name)):
        return folder
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    snapshots = hub.expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    return next((snapshot for snapshot in sorted(snapshots.glob("*")) if _is_model(snapshot)), None)


def plan_job(job: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Checks a job, measures its prompts and estimates its memory.

    Raises:
        BadInputError: as :func:`nightshift.config.load.load_job`, or the data is wrong.
    """
    spec = load_any(job, overrides)
    with waiting("measuring the prompts"):
        plan = make_plan(spec)
    if as_json:
        print_json(plan)
    else:
        for line in plan_lines(plan):
            print(line)
    return EXIT_DONE


def make_plan(spec: JobSpec) -> dict[str, Any]:
    """The plan as plain values. ``model`` and what depends on it are None where the model is not on this machine."""
    pairs = spec.is_preference  # samples nothing: a step is so many pairs, and no policy version is behind
    plan: dict[str, Any] = {
        "name": spec.name,
        "samples_per_step": spec.rollout.batch_size * (2 if pairs else spec.rollout.n),
        "max_staleness": 0 if pairs else spec.pipeline.max_staleness,
        "parallelism": {"data": spec.trainer.ranks, "zero_stage": spec.trainer.zero_stage},
        "model_path": spec.model.path,
        "model": None,
        "data": None,
        "memory": None,
        "memory_total_bytes": None,
        "memory_machine_bytes": machine_memory(),
        "kv_cache_tokens": None,
    }
    folder = local_model(spec.model.path)
    if folder is None:
        return plan
    spec.model.path = str(folder)
    shape = read_shape(folder)
    plan["model"] = asdict(shape)
    plan["data"] = _data(spec)
    parts = estimate(spec, shape)
    plan["memory"] = {part.role: {"bytes": part.bytes, "made_of": part.made_of} for part in parts}
    plan["memory_total_bytes"] = sum(part.bytes for part in parts)
    plan["kv_cache_tokens"] = None if pairs else kv_tokens(spec, shape)
    return plan


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The plan as text."""
    lines = [f"job {plan['name']}: valid"]
    if plan["model"] is None:
        lines.append(
            f"model {plan['model_path']}: not on this machine yet, so that prompts and memory are not known; "
            "`nightshift run` fetches it"
        )
        return lines
    shape = ModelShape(**plan["model"])
    lines.append(f"model {plan['model_path']}: {shape.parameters / 1e6:.1f} million parameters, {shape.layers} layers")
    data = plan["data"]
    lines += data["lines"]
    lines.append(
        f"step: {plan['samples_per_step']} samples; at most {plan['max_staleness']} policy versions behind; "
        f"{plan['parallelism']['data']} trainer rank(s), ZeRO stage {plan['parallelism']['zero_stage']}"
    )
    if plan["kv_cache_tokens"] is not None:
        lines.append(f"KV cache: {plan['kv_cache_tokens']} tokens")
    lines.append("memory, estimated:")
    for role, part in plan["memory"].items():
        made = ", ".join(f"{name} {mib(size)}" for name, size in part["made_of"].items() if size)
        lines.append(f"  {role:<13}{mib(part['bytes']):>10}  {made}")
    total, machine = plan["memory_total_bytes"], plan["memory_machine_bytes"]
    fits = "" if machine is None else f" of {mib(machine)} on this machine" + ("" if total < machine else ": TOO MUCH")
    lines.append(f"  {'total':<13}{mib(total):>10} {fits}")
    return lines


def machine_memory() -> int | None:
    """Bytes of memory that this process may use: the machine's, or the control group's limit where it is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def _data(spec: JobSpec) -> dict[str, Any]:
    from nightshift.cli.data import check_data

    check = check_data(spec)
    return {**asdict(check), "lines": check.lines}


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()
