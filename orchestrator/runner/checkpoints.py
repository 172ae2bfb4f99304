"""Checkpoints of a run: where they are, which is the newest whole one, and which may go."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
#: Key of a manifest: the clock asked for this checkpoint. It is only there to go on from, until the next one is.
BY_CLOCK = "by_clock"
_STEP = re.compile(r"global_step_(\d+)")


class Checkpoints:
    """Folders ``checkpoints/{trainer,actor}/global_step_N`` of one run.

    A checkpoint counts once its resume state holds a manifest: that is the commit point of everything before it. Small
    copies of all manifests stay in ``checkpoints/manifests`` when folders are rotated away.
    """

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "checkpoints"
        self._by_clock: dict[int, bool] = {}

    def state_dir(self, step: int) -> Path:
        """Resume state of a step."""
        return self.root / "trainer" / f"global_step_{step}"

    def critic_dir(self, step: int) -> Path:
        """Resume state of the critic, written before that of the policy, which commits."""
        return self.root / "critic" / f"global_step_{step}"

    def export_dir(self, step: int) -> Path:
        """HF folder of a step."""
        return self.root / "actor" / f"global_step_{step}"

    def committed(self) -> list[int]:
        """Steps with a whole checkpoint, in numeric order."""
        return [step for step, folder in _steps(self.root / "trainer") if (folder / MANIFEST).is_file()]

    def broken(self) -> list[Path]:
        """Folders of checkpoints that were never completed."""
        half = [folder for _, folder in _steps(self.root / "trainer") if not (folder / MANIFEST).is_file()]
        return half + [path for path in self.root.glob("*/*.tmp*") if path.is_dir()]

    def manifest(self, step: int) -> dict[str, Any]:
        """What was committed with this step."""
        return dict(json.loads((self.state_dir(step) / MANIFEST).read_text()))

    def keep_manifest(self, step: int, manifest: dict[str, Any]) -> None:
        """Keeps a copy of the manifest that outlives the checkpoint."""
        self._by_clock[step] = bool(manifest.get(BY_CLOCK))
        folder = self.root / "manifests"
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{manifest['lineage']}-{step}.tmp"
        part.write_text(json.dumps(manifest))
        part.replace(part.with_suffix(".json"))

    def rotate(self, keep: int | None) -> list[Path]:
        """Removes all but the newest ``keep`` checkpoints; None keeps all. Returns the removed folders.

        One that the clock asked for does not count, and goes as soon as there is a newer one.
        """
        gone: list[Path] = []
        committed = self.committed()
        clocked = [step for step in committed if self._asked_by_clock(step)]
        old = rotated([step for step in committed if step not in clocked], keep)
        for step in [*old, *(step for step in clocked if step != committed[-1])]:
            # A crash may have come between the commit and its copy.
            self.keep_manifest(step, self.manifest(step))
            for folder in (self.state_dir(step), self.export_dir(step), self.critic_dir(step)):
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
        return gone

    def _asked_by_clock(self, step: int) -> bool:
        if step not in self._by_clock:
            self._by_clock[step] = bool(self.manifest(step).get(BY_CLOCK))
        return self._by_clock[step]


def rotated(steps: list[int], keep: int | None) -> list[int]:
    """Which of these steps are removed when the newest ``keep`` stay."""
    if keep is None:
        return []
    ordered = sorted(steps)
    return ordered[: max(0, len(ordered) - keep)]


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob("global_step_*"):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match.group(1)), path))
    return sorted(found)
