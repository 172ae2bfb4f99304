"""Where a run goes on: at its beginning, or at its newest checkpoint in a new lineage.

The same rules hold for a run that a person resumes, an orchestrator that was killed, and a trainer that died in a run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from nightshift.data import PromptSet
from nightshift.wire.errors import BadInputError, WireError
from nightshift.wire.events import EventLog
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


async def take_up(
    books: Books, spool: Spool, start: Start, train: PromptSet, tracing: Tracing
) -> list[tuple[GroupRecord, Group | None]]:
    """Groups in flight at the last commit: with their experience where every token is from an ancestor."""
    kept = {}
    for index in spool.indices():
        samples = spool.get(index)
        versions = {span.version for sample in samples or [] for span in sample.versions}
        if samples and all(start.lineage.contains(PolicyVersion.parse(version)) for version in versions):
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


def _job_trace_id() -> str:
    """The caller's trace, where the environment names one; a malformed one starts a new trace, as the standard asks."""
    try:
        return TraceContext.from_traceparent(os.environ.get("TRACEPARENT", "")).trace_id
    except WireError:
        return new_trace_id()
