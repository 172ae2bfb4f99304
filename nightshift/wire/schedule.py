"""The schedule of a run, ``schedule.jsonl``: one line for each step, with all that its update was made of.

Which groups came together in a step is a matter of timing in an asynchronous run. The schedule notes it, so that a step
can be made again from the stored rollouts.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from nightshift.wire.errors import BadInputError
from nightshift.wire.version import PolicyVersion

SCHEDULE = "schedule.jsonl"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it was made.

    Attributes:
        step: its number, from 1.
        expect: policy version that it started from.
        version: policy version that it made.
        attempt: number of the attempt that succeeded.
        parts: ids of the groups of each part, in order.
        versions: group id -> oldest and newest policy version among its tokens; empty for a group without tokens.
        left_out: ids of samples of these groups that the trainer was not given: unscored, or without a token.
        learning_rate: of the optimiser step.
        loss: fields of the last part's :class:`nightshift.wire.experience.LossSpec`, the totals of the batch included.
        algorithm: section ``algorithm`` as it held for the step.
        stepped: whether there was anything to learn from.
        digest: BLAKE3 of the published weights, hex; empty where they never left the device.
        time: unix seconds.
        critic: of the critic's own step: ``learning_rate``, ``loss``, ``left_out`` and ``digest`` as above; empty where
            the run has no critic, or was made before this was noted.
    """

    step: int
    expect: str
    version: str
    attempt: int
    parts: list[list[str]]
    versions: dict[str, list[str]]
    left_out: list[str]
    learning_rate: float
    loss: dict[str, Any]
    algorithm: dict[str, Any]
    stepped: bool
    digest: str
    time: float
    critic: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """A record from a line of the file; fields of a later version are left out.

        Raises:
            BadInputError: a field is missing, or it is no map.
        """
        try:
            needed = {item.name: values[item.name] for item in fields(cls) if item.default_factory is MISSING}
        except KeyError as error:
            raise BadInputError(f"a line of {SCHEDULE} has no field {error.args[0]!r}", role="job") from error
        except TypeError as error:
            raise BadInputError(f"a line of {SCHEDULE} is no step: {str(values)[:80]}", role="job") from error
        return cls(**needed, critic=dict(values.get("critic") or {}))

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON holds it; its lists and maps are the record's own."""
        # dataclasses.asdict copies each of a batch's ids, for each step and once more for each commit.
        return {item.name: getattr(self, item.name) for item in fields(self)}


def append_step(run_dir: Path, record: StepRecord) -> None:
    """Writes a line. What a process that was killed left of one is ended first."""
    path = run_dir / SCHEDULE
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record.to_dict()).encode() + b"\n")


def read_schedule(run_dir: Path) -> dict[int, StepRecord]:
    """The steps that lead to the run's newest weights, by number.

    A run that went back to a checkpoint made some of its steps twice: only the later ones count.

    Raises:
        BadInputError: the run has none, or a line of it is no step.
    """
    try:
        lines = (run_dir / SCHEDULE).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        raise BadInputError(f"{run_dir} has no {SCHEDULE}: it has made no step", role="job") from None
    steps: dict[int, StepRecord] = {}
    lineage = -1
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue  # half a line
        record = StepRecord.from_dict(values)
        number = PolicyVersion.parse(record.version).lineage
        if number != lineage:
            steps = {step: known for step, known in steps.items() if step < record.step}
        lineage = number
        steps[record.step] = record
    return steps
