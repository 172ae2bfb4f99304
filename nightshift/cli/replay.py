"""``nightshift replay``: makes a step of a run again from what the run stored, and says what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nightshift.cli.output import EXIT_DONE, EXIT_FAILED, print_json, waiting
from nightshift.cli.runs import find_run
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError
from nightshift.wire.schedule import read_schedule

_ROOT = Path(__file__).resolve().parents[2]


def show_replay(run: str, runs_dir: str, *, step: int, as_json: bool) -> int:
    """Replays a step in a process of its own, which may load torch, and prints what it found.

    Returns:
        0 where nothing differs, 1 where something does.

    Raises:
        BadInputError: no such run or step, or the run did not store what is needed.
        RoleError: the process failed.
    """
    folder = find_run(run, runs_dir)
    schedule = read_schedule(folder)
    if step not in schedule:
        made = f"{min(schedule)} to {max(schedule)}" if schedule else "none"
        raise BadInputError(f"the run has no step {step} in its schedule (it has {made})", fix="Choose one of them")
    if not as_json:
        print(f"making step {step} of {folder.name} again", flush=True)
    with waiting("replaying"):
        found = _ask(folder, step)
    if as_json:
        print_json(found)
    else:
        _print(found, step)
    return EXIT_DONE if found["equal"] else EXIT_FAILED


def _ask(folder: Path, step: int) -> dict[str, Any]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, "-m", "services.trainer.replay", str(folder), str(step)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = child.stdout.strip().splitlines()
    try:
        found = dict(json.loads(lines[-1]))
    except (IndexError, ValueError):
        said = child.stderr.strip().splitlines()
        raise RoleError(
            f"the replay ended with code {child.returncode}: {said[-1] if said else 'no output'}", role="trainer"
        ) from None
    if "error" in found:
        error = found["error"]
        kind = BadInputError if error["type"] == "BadInputError" else NightshiftError
        raise kind(error["message"], role=error["role"], fix=error["fix"])
    return found


_VERDICTS = {True: "the same weights", False: "OTHER WEIGHTS", None: "no digest recorded"}


def _print(found: dict[str, Any], step: int) -> None:
    begun = f"the checkpoint of step {found['begun_at']}" if found["begun_at"] else "the model's own weights"
    print(f"from {begun}, on {_ranks(found['ranks'])}")
    for made in found["steps"]:
        print(f"  step {made['step']}: {_VERDICTS[made['same']]} ({made['replayed'][:16]})")
        if (critic := made["critic"]) is not None:
            print(f"    critic: {_VERDICTS[critic['same']]} ({critic['replayed'][:16]})")
        if made["note"]:
            print(f"    advantages were not computed again: {made['note']}")
        elif made["advantage_difference"]:
            print(
                "    the stored advantages DIFFER from those of the stored rewards, by up to "
                f"{made['advantage_difference']:.3g}"
            )
    if found["critic_note"]:
        print(f"the critic's steps were not made again: {found['critic_note']}")
    if found["weight_difference"] is None:
        print(f"there is no checkpoint of step {step} to compare weights with")
    else:
        print(f"largest difference from the checkpoint of step {step}: {found['weight_difference']:.3g}")
    if found["critic_weight_difference"] is not None:
        print(
            f"largest difference of the critic, on {_ranks(found['critic_ranks'])}: "
            f"{found['critic_weight_difference']:.3g}"
        )
    if found["inexact"]:
        print(f"a difference need not mean that anything is wrong: {found['inexact']}")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
