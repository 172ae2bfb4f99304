"""``nightshift audit``: were all prompt groups used once, with the tokens that servers drew? Exit code 1: no."""

from __future__ import annotations

from nightshift.analysis.audit import audit
from nightshift.analysis.evidence import load
from nightshift.analysis.findings import Audit, summary
from nightshift.cli.output import EXIT_DONE, EXIT_FAILED, print_json, waiting
from nightshift.cli.runs import find_run

_SHOWN = 20


def show_audit(run: str, runs_dir: str, *, as_json: bool) -> int:
    """Prints the audit of a run. Returns 1 where something does not hold.

    Raises:
        BadInputError: there is no such run, it has no checkpoint yet, or a file of it cannot be read.
    """
    folder = find_run(run, runs_dir)
    with waiting("auditing the run"):
        found = audit(load(folder))
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(lines_of(found)))
    return EXIT_DONE if found.balanced else EXIT_FAILED


def lines_of(found: Audit) -> list[str]:
    """The audit as lines of text."""
    terms = [f"{count} {name.replace('_', ' ')}" for name, count in found.accounts.items() if name != "issued"]
    lines = [
        f"{found.run_id}: step {found.step} in lineage {found.lineage}",
        f"issued {found.accounts.get('issued', 0)} = {' + '.join(terms)}",
        f"stored: {found.samples} samples of {found.groups} groups, {found.tokens} tokens, the oldest {found.oldest} "
        "versions old",
        f"request logs: {found.requests} lines of {found.servers} servers",
    ]
    if found.uncommitted:
        lines.append(f"steps {found.uncommitted[0]} to {found.uncommitted[-1]} are stored and not committed yet")
    lines += found.notes
    if found.balanced:
        return [*lines, "balanced"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary(found.findings).items())
    lines.append(f"NOT balanced: {len(found.findings)} findings ({kinds})")
    lines += [f"- [{finding.kind}] {finding.subject}: {finding.message}" for finding in found.findings[:_SHOWN]]
    if len(found.findings) > _SHOWN:
        lines.append(f"- and {len(found.findings) - _SHOWN} more (--json shows all)")
    return lines
