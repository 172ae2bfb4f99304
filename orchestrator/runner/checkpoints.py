"""Checkpoints of a run: where they are, which is the newest whole one, and which may go."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_STEP = re.compile(r"global_step_(\d+)")


class Checkpoints:
    """Folders ``checkpoints/{trainer,actor}/global_step_N`` of one run.

    A checkpoint counts once its resume state holds a manifest: that is the commit point of everything before it. Small
    copies of all manifests stay in ``checkpoints/manifests`` when folders are rotated away.
    """

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "checkpoints"

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
        folder = self.root / "manifests"
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{manifest['lineage']}-{step}.tmp"
        part.write_text(json.dumps(manifest))
        part.replace(part.with_suffix(".json"))

    def rotate(self, keep: int | None) -> list[Path]:
        """Removes all but the newest ``keep`` checkpoints; None keeps all. Returns the removed folders."""
        gone: list[Path] = []
        for step in rotated(self.committed(), keep):
            # A crash may have come between the commit and its copy.
            self.keep_manifest(step, self.manifest(step))
            for folder in (self.state_dir(step), self.export_dir(step), self.critic_dir(step)):
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
        return gone


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
