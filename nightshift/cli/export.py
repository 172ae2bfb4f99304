"""``nightshift export``: a run's HF checkpoint, copied."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nightshift.cli.output import EXIT_DONE, print_json, waiting
from nightshift.cli.runs import checkpoints, find_run
from nightshift.wire.errors import BadInputError


def export_checkpoint(run: str, runs_dir: str, folder: Path, step: int | None, *, as_json: bool) -> int:
    """Copies the checkpoint of ``step``, or the newest, to ``folder``, which appears by rename.

    Raises:
        BadInputError: there is no such run or checkpoint, or the folder holds something already.
    """
    source_run = find_run(run, runs_dir)
    found = {int(path.name.rpartition("_")[2]): path for path in checkpoints(source_run, "actor")}
    if not found:
        raise BadInputError(f"the run {source_run.name!r} has no HF checkpoint")
    if step is not None and step not in found:
        steps = ", ".join(map(str, found))
        raise BadInputError(f"the run {source_run.name!r} has no checkpoint of step {step}", fix=f"It has: {steps}")
    source = found[step if step is not None else max(found)]
    folder = folder.expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(f"{str(folder)!r} exists and is not an empty folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with waiting(f"copying {source.name}"):
            shutil.copytree(source, temporary)
        temporary.replace(folder)
    except OSError as error:
        raise BadInputError(f"cannot write {str(folder)!r}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print_export(folder, int(source.name.rpartition("_")[2]), as_json=as_json)
    return EXIT_DONE


def print_export(folder: Path, step: int | None, *, as_json: bool) -> None:
    """Says where a checkpoint was put."""
    print_json({"folder": str(folder), "step": step}) if as_json else print(folder)
