"""Mutates the algorithms one line at a time, and says which changes their unit tests would not have noticed.

``scripts/mutate.py [--only WORD] [--jobs N] [--markdown]`` works on copies of the sources in a temporary folder. Exit
code 1 where a mutation survives, or no longer fits its source. ``scripts/mutations.toml`` lists them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "mutations.toml"
_COPIED = ("nightshift", "orchestrator", "services", "tests/__init__.py", "tests/unit", "tests/fixtures")
_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one source.

    Attributes:
        kind: sign, mask, denominator, off by one, or another word for what is wrong.
        tests: files whose tests must notice it.
    """

    unit: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(path: Path = TABLE) -> list[Mutation]:
    """The mutations of the table."""
    found = []
    for unit in tomllib.loads(path.read_text(encoding="utf-8"))["unit"]:
        for change in unit["change"]:
            kind, old, new = change
            found.append(Mutation(unit["name"], kind, unit["file"], old, new, tuple(unit["tests"])))
    return found


def misfits(mutations: list[Mutation]) -> list[str]:
    """Mutations whose old text does not stand in its source exactly once."""
    texts = {m.file: (ROOT / m.file).read_text(encoding="utf-8") for m in mutations}
    return [f"{m.file}: {m.old!r} stands there {n} times" for m in mutations if (n := texts[m.file].count(m.old)) != 1]


def survives(mutation: Mutation, folder: Path) -> bool:
    """Whether the unit's tests pass with the mutation, in a copy of the sources of one's own."""
    path = folder / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=_LIMIT_S, check=False)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False  # a change that makes the tests hang is noticed
    finally:
        path.write_text(original, encoding="utf-8")


def copy(folder: Path) -> Path:
    """A copy of the sources and unit tests."""
    for name in _COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")
    return folder


def run(mutations: list[Mutation], jobs: int) -> list[bool]:
    """Whether each mutation survives."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        places = [copy(Path(scratch) / str(job)) for job in range(jobs)]

        def work(item: tuple[int, Mutation]) -> list[tuple[int, bool]]:
            return [(item[0], survives(item[1], places[item[0] % jobs]))]

        lanes = [[(n, m) for n, m in enumerate(mutations) if n % jobs == lane] for lane in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            outcomes = pool.map(lambda lane: [pair for item in lane for pair in work(item)], lanes)
            return [alive for _, alive in sorted(pair for lane in outcomes for pair in lane)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only units or files with this word in their name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print the list as a table")
    arguments = parser.parse_args()
    mutations = [m for m in read() if arguments.only in m.unit or arguments.only in m.file]
    if wrong := misfits(mutations):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    outcomes = run(mutations, arguments.jobs)
    if arguments.markdown:
        print("| unit | what is wrong | from | to | noticed |\n| --- | --- | --- | --- | --- |")
        for mutation, alive in zip(mutations, outcomes, strict=True):
            old, new = (text.strip().replace("|", "\\|").replace("\n", " ") for text in (mutation.old, mutation.new))
            print(f"| {mutation.unit} | {mutation.kind} | `{old}` | `{new}` | {'no' if alive else 'yes'} |")
        print()
    for mutation, alive in zip(mutations, outcomes, strict=True):
        if alive:
            print(f"survives: {mutation.unit} ({mutation.kind}): {mutation.old!r} -> {mutation.new!r}")
    print(f"{len(mutations)} mutations, {sum(outcomes)} not noticed")
    return int(any(outcomes))


if __name__ == "__main__":
    sys.exit(main())
