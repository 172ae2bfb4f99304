"""Where the orchestrator's time goes, by part: shares of the samples that py-spy took of it.

``python -m tests.bench.bench_fleet cost --profile FILE …`` writes FILE and prints the shares, and
``python -m tests.bench.fleet_parts FILE`` prints them again. Counted is the time in which a thread holds the
interpreter, from the end of the imports on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

#: Part and what the file or function of a frame holds; the innermost frame that belongs to a part decides.
PARTS = (
    ("text of the ids", ("nightshift/data/",)),
    ("frames read and checked", ("runner/collector.py", "nightshift/wire/frames.py")),
    ("requests over HTTP", ("runner/http1.py", "runner/deadlines.py", "runner/files.py")),
    (
        "a sample's way to its server",
        ("runner/engine.py", "runner/turnstile.py", "runner/fleet.py", "runner/roster.py"),
    ),
    ("gRPC itself", ("grpc/",)),
    ("samples to the scorers and back", ("runner/scorer.py", "_reward ")),
    ("experience to the spool", ("runner/spool.py",)),
    ("experience to the trainer", ("runner/trainer.py",)),
    ("advantages", ("nightshift/algorithms/",)),
    ("spans and events", ("light_spans.py", "tracing.py", "sampling.py", "exporter.py", "wire/events.py")),
    ("ledger and its SQL", ("runner/books.py", "runner/ledger.py", "orchestrator/store/")),
    ("steps: schedule, metrics, checkpoint", ("runner/stepper.py", "runner/update.py", "runner/step_metrics.py")),
    ("the group's own way", ("runner/group.py", "runner/pipeline.py", "runner/in_flight.py", "runner/admission.py")),
)
_LOOP, _REST = "the event loop itself", "everything else"
#: Work of its own, whatever it calls.
_PUSH, _PUSHES = "weights pushed and probed, loads read", ("Fleet._bring ", "runner/watcher.py")


def part_of(stack: str) -> str | None:
    """The part of one stack, outermost frame first; None for imports."""
    frames = stack.split(";")
    if any("importlib" in frame for frame in frames):
        return None
    if any(mark in stack for mark in _PUSHES):
        return _PUSH
    for frame in reversed(frames):
        for part, marks in PARTS:
            if any(mark in frame for mark in marks):
                return part
    return _LOOP if frames[-1].startswith("Runner.run ") else _REST


def shares(lines: Iterable[str]) -> dict[str, float]:
    """Part -> share of the samples, largest first; lines as ``py-spy record --format raw`` writes them."""
    counts: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rstrip().rpartition(" ")
        if count.isdigit() and (part := part_of(stack)) is not None:
            counts[part] += int(count)
    total = sum(counts.values())
    return {part: count / total for part, count in counts.most_common()}


def read(path: Path) -> dict[str, float]:
    """The shares of a file."""
    return shares(path.read_text(errors="replace").splitlines())


def main() -> None:
    """The command."""
    for part, share in read(Path(sys.argv[1])).items():
        print(f"{100 * share:5.1f} %  {part}")


if __name__ == "__main__":
    main()
