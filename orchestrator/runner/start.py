"""Where a run goes on: at its beginning, or at its newest checkpoint in a new lineage.

The same rules hold for a run that a person resumes, an orchestrator that was killed, and a trainer that died in a run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightshift.config import JobSpec
from nightshift.data import Cursor, Prompt, PromptSet
from nightshift.wire.errors import BadInputError, WireError
from nightshift.wire.events import EventLog
from nightshift.wire.experience import Sample
from nightshift.wire.trace import TraceContext, new_trace_id
from nightshift.wire.version import Lineage, PolicyVersion
from orchestrator.runner.books import Books
from orchestrator.runner.checkpoints import Checkpoints
from orchestrator.runner.group import Group, start_group_span
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.runner.spool import Spool
from orchestrator.runner.tracing import Tracing
from orchestrator.store.state import StateStore


@dataclass(slots=True)
class Start:
    """Where a run begins or goes on.

    Attributes:
        lineage: of the weights that it will make.
        step: steps that are in the weights already.
        state_dir: resume state that the trainer loads; empty: the model's own weights.
        records: groups that the database knows.
        manifest: of the checkpoint; None at the beginning.
    """

    lineage: Lineage
    job_trace_id: str
    step: int
    state_dir: str
    records: list[GroupRecord]
    manifest: dict[str, Any] | None = None


def find_start(run_id: str, store: StateStore, checkpoints: Checkpoints, events: EventLog, *, resume: bool) -> Start:
    """Reads database and checkpoints.

    Raises:
        BadInputError: there is a run already and ``resume`` is false, or its database is not the one that the
            checkpoint was made with.
    """
    known, records = store.load(run_id)
    committed = checkpoints.committed()
    manifest = checkpoints.manifest(committed[-1]) if committed else None
    if manifest is not None and len(records) < manifest["issued"]:
        raise BadInputError(
            f"the database knows {len(records)} prompt groups of this run, its checkpoint of step {committed[-1]} "
            f"{manifest['issued']}: with it, groups would be trained twice",
            role="job",
            fix="Restore the run's state.db, or the database that NIGHTSHIFT_DATABASE_URL names",
        )
    if known is None:
        return Start(Lineage(run_id), _job_trace_id(), 0, "", [])
    if not resume:
        raise BadInputError(
            f"{checkpoints.root.parent} holds a run already", role="job", fix="Give --resume to go on with it"
        )
    for folder in checkpoints.broken():
        events.append("warning", role="job", message=f"{folder} was never completed and is not used")
    step = committed[-1] if committed else 0
    state_dir = str(checkpoints.state_dir(step)) if committed else ""
    lineage = known.lineage.branch(known.lineage.number + 1, step)
    return Start(lineage, known.job_trace_id, step, state_dir, records, manifest)


def walk_on(cursor: Cursor, start: Start) -> None:
    """Brings the cursor behind the prompts of the groups that were issued.

    Raises:
        BadInputError: they are not the prompts that the cursor walks over.
    """
    if start.manifest is not None:
        cursor.check(start.manifest["cursor"])
    for record in start.records:
        if cursor.next() != (record.epoch, record.row):
            raise BadInputError(
                f"prompt group {record.index} of the run was row {record.row} of epoch {record.epoch}, and is another "
                "one by the data as they are now: prompts would be trained twice, others never",
                role="job",
                fix="Resume with the same data files, data settings and trainer.seed",
            )


async def take_up(
    books: Books, spool: Spool, start: Start, train: PromptSet, tracing: Tracing, spec: JobSpec
) -> list[tuple[GroupRecord, Group | None]]:
    """Groups in flight at the last commit: with their experience where every token is from an ancestor, and all is
    there that the job, which may have changed, needs of it.
    """
    kept = {}
    for index in spool.indices():
        samples, record = spool.get(index), books.ledger.records.get(index)
        if samples and record and _usable(samples, train.prompts[record.row], start.lineage, spec):
            kept[index] = samples
        else:
            spool.remove([index])
    if start.records:
        await books.roll_back(start.step, frozenset(kept))
    resumed: list[tuple[GroupRecord, Group | None]] = []
    for record in books.ledger.records.values():
        if record.state is GroupState.RUNNING:
            resumed.append((record, None))
        elif record.state is GroupState.READY:
            prompt = train.prompts[record.row]
            span, _ = start_group_span(tracing, record.index, prompt, record.epoch, record.trace_id)
            buffer = tracing.child("buffer", span)
            group = Group(record.index, prompt, record.epoch, record.trace_id, start.step, span, buffer)
            group.samples = kept[record.index]
            resumed.append((record, group))
    spool.remove(kept.keys() - {record.index for record, _ in resumed})  # committed, or ended otherwise
    return resumed


def _usable(samples: Sequence[Sample], prompt: Prompt, lineage: Lineage, spec: JobSpec) -> bool:
    needed = {"ref_logprobs": spec.needs_reference, "teacher_logprobs": spec.needs_teacher}
    needed["values"] = spec.scorers.critic is not None
    return all(
        np.array_equal(sample.prompt_ids, prompt.prompt_ids)
        and all(lineage.contains(PolicyVersion.parse(span.version)) for span in sample.versions)
        and all(getattr(sample, name) is not None for name, wanted in needed.items() if wanted)
        for sample in samples
    )


def _job_trace_id() -> str:
    """The caller's trace, where the environment names one; a malformed one starts a new trace, as the standard asks."""
    try:
        return TraceContext.from_traceparent(os.environ.get("TRACEPARENT", "")).trace_id
    except WireError:
        return new_trace_id()
