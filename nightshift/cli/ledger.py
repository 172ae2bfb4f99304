"""``nightshift ledger``: issued = trained + dropped_stale + dropped_filtered + failed + cancelled + in_flight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nightshift.cli.output import EXIT_DONE, EXIT_FAILED, print_json, waiting
from nightshift.cli.runs import EVENTS, find_run
from nightshift.wire.errors import BadInputError
from nightshift.wire.events import Event, read_events

ENDS = ("trained", "dropped_stale", "dropped_filtered", "failed", "cancelled", "in_flight")


def newest_ledger(events: Iterable[Event]) -> dict[str, int] | None:
    """The last ledger figures that any event holds, at its top or in its metrics as ``ledger/<name>``."""
    found = None
    for event in events:
        ledger = event.get("ledger")
        if isinstance(ledger, dict):
            found = {str(key): value for key, value in ledger.items() if isinstance(value, int)} or found
            continue
        metrics: dict[str, Any] = event.get("metrics") or {}
        named = {key.removeprefix("ledger/"): value for key, value in metrics.items() if key.startswith("ledger/")}
        if named:
            found = {key: int(value) for key, value in named.items() if value is not None}
    return found


def balance(ledger: dict[str, int]) -> int:
    """Issued groups minus those whose end is known: 0 where the books are right."""
    return ledger.get("issued", 0) - sum(ledger.get(name, 0) for name in ENDS)


def show_ledger(run: str, runs_dir: str, *, as_json: bool) -> int:
    """Prints the ledger. Returns 1 where it does not balance.

    Raises:
        BadInputError: there is no such run, or it has issued nothing yet.
    """
    folder = find_run(run, runs_dir)
    with waiting("reading the run's events"):
        ledger = newest_ledger(read_events(folder / EVENTS))
    if ledger is None:
        raise BadInputError(f"the run {folder.name!r} has no ledger yet")
    return print_ledger(folder.name, ledger, as_json=as_json)


def print_ledger(run_id: str, ledger: dict[str, int], *, as_json: bool) -> int:
    """Prints a ledger's figures. Returns 1 where they do not balance."""
    off = balance(ledger)
    if as_json:
        print_json({"run_id": run_id, **ledger, "balanced": off == 0})
    else:
        print(f"issued            {ledger.get('issued', 0):>8}")
        for name in ENDS:
            print(f"  {name:<16}{ledger.get(name, 0):>8}")
        print("balanced" if off == 0 else f"NOT balanced: {off} groups unaccounted for")
    return EXIT_DONE if off == 0 else EXIT_FAILED
