"""Run folders: finding one, making one, and holding one."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nightshift.wire.errors import BadInputError

EVENTS = "events.jsonl"
JOB = "job.yaml"
SERVICES = "services.json"
_LOCK, RUNNER_LOCK = ".lock", ".runner.lock"


def find_run(name: str, runs_dir: str | Path | None = None) -> Path:
    """The folder of a run: given as a folder, or as a run id (or its unique beginning) below ``runs_dir``.

    Raises:
        BadInputError: there is no such run; the message names the newest ones that are there.
    """
    direct = Path(name).expanduser()
    if (direct / JOB).is_file() or (direct / EVENTS).is_file():
        return direct.resolve()
    root = Path(runs_dir or "runs")
    known = list_runs(root)
    matches = [run for run in known if run.name == name] or [run for run in known if run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0].resolve()
    if matches:
        raise BadInputError(f"{name!r} fits several runs in {str(root)!r}: {', '.join(run.name for run in matches)}")
    newest = ", ".join(run.name for run in known[:3])
    raise BadInputError(
        f"there is no run {name!r}", fix=f"The newest in {str(root)!r}: {newest}" if newest else f"{root} has no runs"
    )


def list_runs(root: Path) -> list[Path]:
    """The run folders below ``root``, newest first."""
    if not root.is_dir():
        return []
    runs = [folder for folder in root.iterdir() if (folder / JOB).is_file() or (folder / EVENTS).is_file()]
    return sorted(
        runs, key=lambda run: (run / EVENTS if (run / EVENTS).exists() else run).stat().st_mtime, reverse=True
    )


def new_run_id(name: str, now: float | None = None) -> str:
    """``<name>-<UTC date>-<UTC time>-<4 hex digits>``."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{name}-{stamp}-{os.urandom(2).hex()}"


def make_run(folder: Path) -> None:
    """Makes a run's folder and what is below it.

    Raises:
        BadInputError: the folder is there already, or cannot be made.
    """
    try:
        folder.mkdir(parents=True)
        for name in ("logs", "rollouts", "checkpoints"):
            (folder / name).mkdir()
    except FileExistsError as error:
        raise BadInputError(f"the run folder {str(folder)!r} exists", fix="Choose another, or use --resume") from error
    except OSError as error:
        raise BadInputError(f"cannot make the run folder {str(folder)!r}: {error.strerror}") from error


@contextmanager
def hold(folder: Path, lock: str = _LOCK, patience_s: float = 0.0) -> Iterator[None]:
    """Holds a run, so that no second process drives it.

    Args:
        lock: the command's, or that of its runner, which may outlive a command that was killed.
        patience_s: how long another process may take to let it go.

    Raises:
        BadInputError: another process holds it.
    """
    deadline = time.monotonic() + patience_s
    with (folder / lock).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise BadInputError(f"the run {folder.name!r} is running in another process") from error
            time.sleep(0.1)
        yield


def checkpoints(folder: Path, kind: str) -> list[Path]:
    """Checkpoints of a run, oldest first. ``kind``: "actor" (HF folders) or "trainer" (resume states)."""
    found = [path for path in (folder / "checkpoints" / kind).glob("global_step_*") if path.is_dir()]
    numbered = [path for path in found if path.name.rpartition("_")[2].isdigit()]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("_")[2]))
