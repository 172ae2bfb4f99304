"""The commands that read a run, where a service has it: they print what they print of a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from nightshift.analysis.report import Report
from nightshift.cli.export import print_export
from nightshift.cli.ledger import print_ledger
from nightshift.cli.output import EXIT_DONE, WAITING, mib, print_json, waiting
from nightshift.cli.report_command import print_report
from nightshift.cli.rollouts import print_rollouts
from nightshift.cli.trace import Entry, print_trace
from nightshift.client import Client

T = TypeVar("T")
_MOST_ROLLOUTS = 500


def _ask(url: str | None, name: str, question: Callable[[Client, str], T]) -> tuple[str, T]:
    """A job's id by its beginning, and the answer to a question about it."""
    with Client(url) as client, waiting(WAITING):
        job_id = client.find(name).id
        return job_id, question(client, job_id)


def trace(url: str | None, trace_id: str, name: str | None, *, as_json: bool) -> int:
    """Prints the timeline of one prompt group, of one job or of the newest that knows it."""
    with Client(url) as client, waiting(WAITING):
        found = client.trace(trace_id, client.find(name).id if name is not None else None)
    print_trace(found["job"], found["trace_id"], [Entry(**entry) for entry in found["entries"]], as_json=as_json)
    return EXIT_DONE


def ledger(url: str | None, name: str, *, as_json: bool) -> int:
    """Prints what became of every prompt group."""
    job_id, found = _ask(url, name, Client.ledger)
    return print_ledger(job_id, {key: value for key, value in found.items() if key != "balanced"}, as_json=as_json)


def report(url: str | None, name: str, *, as_json: bool) -> int:
    """Prints the report on a run."""
    _, found = _ask(url, name, Client.report)
    return print_report(TypeAdapter(Report).validate_python(found), as_json=as_json)


def rollouts(url: str | None, name: str, *, step: int | None, limit: int, as_json: bool) -> int:
    """Prints stored samples, the newest steps first."""
    query = {"limit": limit or _MOST_ROLLOUTS} | ({"step": step} if step is not None else {})
    _, rows = _ask(url, name, lambda client, job_id: client.rollouts(job_id, **query))
    print_rollouts(rows, as_json=as_json)
    return EXIT_DONE


def logs(url: str | None, name: str, *, role: str | None, lines: int, as_json: bool) -> int:
    """Prints the end of a role's log, or which logs there are."""
    if role is None:
        for log, size in _ask(url, name, Client.log_files)[1].items():
            print_json({"role": log, "bytes": size}) if as_json else print(f"{log:<20} {mib(size):>10}")
        return EXIT_DONE
    for line in _ask(url, name, lambda client, job_id: client.logs(job_id, role, lines))[1].splitlines():
        print_json({"role": role, "line": line}) if as_json else print(line)
    return EXIT_DONE


def export(url: str | None, name: str, *, folder: Path, step: int | None, as_json: bool) -> int:
    """Fetches a checkpoint."""

    def fetch(client: Client, job_id: str) -> tuple[Path, int | None]:
        chosen = step
        if chosen is None:
            chosen = max((checkpoint.step for checkpoint in client.checkpoints(job_id)), default=None)
        return client.export(job_id, folder, chosen), chosen

    _, (made, exported) = _ask(url, name, fetch)
    print_export(made, exported, as_json=as_json)
    return EXIT_DONE
