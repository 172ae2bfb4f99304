"""Whether the tokens of a stored sample are those that servers drew: the sample against the request logs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nightshift.analysis.evidence import Row
from nightshift.wire.experience import FINISH_LENGTH, FINISH_STOP
from nightshift.wire.request_log import RequestLog, Served, hash_ids


@dataclass(slots=True)
class Logged:
    """The request logs, by what is looked up.

    Attributes:
        lines: by sample id.
        taken: when a start of a server took a version, by (server, incarnation) and version.
    """

    lines: Mapping[str, Sequence[Served]]
    taken: Mapping[tuple[str, str], Mapping[str, float]]

    @classmethod
    def of(cls, log: RequestLog, run_id: str) -> Logged:
        """The lines of one run's requests."""
        lines: dict[str, list[Served]] = defaultdict(list)
        for line in log.served:
            if line.request.startswith(f"{run_id}."):
                lines[line.sample].append(line)
        taken: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for record in log.taken:
            taken[record.server, record.incarnation].setdefault(record.version, record.time)
        return cls(lines, taken)

    def held(self, line: Served, version: str) -> bool:
        """Whether the server had taken these weights before it served the line."""
        times = self.taken.get((line.server, line.incarnation), {})
        return version in times and times[version] <= line.time


@dataclass(slots=True)
class Proof:
    """What the logs say about a sample of T tokens.

    Attributes:
        unproven: tokens that no server drew behind what is stored before them, as (first, behind the last).
        other_versions: tokens that a server drew with other weights than the stored ones: (first, stored, drawn with).
        never_held: versions that the server which drew with them had never taken.
        ended: whether a server ended the response there for the stored reason, or was killed before it could say.
        lines: lines about the sample.
    """

    unproven: list[tuple[int, int]] = field(default_factory=list)
    other_versions: list[tuple[int, str, str]] = field(default_factory=list)
    never_held: list[str] = field(default_factory=list)
    ended: bool = False
    lines: int = 0


def prove(row: Row, logged: Logged) -> Proof:
    """Holds a sample against the logs.

    A response may consist of parts: what a server drew before it went away, and what another one drew behind it. A line
    counts where the ids that the server went on from are the stored prompt and the stored response up to there, and the
    drawn ids the stored ones behind that.
    """
    tokens = len(row.response_ids)
    lines = logged.lines.get(row.sample_id, ())
    proven = np.zeros(tokens, np.bool_)
    others: dict[int, tuple[str, str]] = {}
    unheld: dict[str, bool] = {}  # whether every server that drew with a version had not taken it
    stored = _by_token(row)
    proof = Proof(lines=len(lines))
    reasons: set[str] = set()  # for which servers ended the response where the stored one ends
    for line in lines:
        offset = line.prompt_tokens - len(row.prompt_ids)
        if not 0 <= offset <= tokens or offset + line.end > tokens:
            continue
        if line.prompt != hash_ids(row.prompt_ids, row.response_ids[:offset]):
            continue
        whole = True
        for span in line.spans:
            first, last = offset + span.start, offset + span.end
            if hash_ids(row.response_ids[first:last]) != span.hash:
                whole = False
                continue
            wrong = [at for at in range(first, last) if stored[at] != span.version]
            for at in wrong:
                others.setdefault(at, (stored[at], span.version))
            if not wrong:
                proven[first:last] = True
                held = logged.held(line, span.version)
                unheld[span.version] = unheld.get(span.version, True) and not held
        if whole and offset + line.end == tokens:
            reasons.add(line.finish)
    for at in np.flatnonzero(proven).tolist():
        others.pop(at, None)
    proof.other_versions = [(at, *others[at]) for at in sorted(others)]
    proof.unproven = _runs(at for at in np.flatnonzero(~proven).tolist() if at not in others)
    proof.never_held = sorted(version for version, never in unheld.items() if never)
    unsaid = tokens > 0 and not reasons & {FINISH_STOP, FINISH_LENGTH}
    proof.ended = row.finish_reason in reasons or unsaid
    return proof


def _by_token(row: Row) -> list[str]:
    """The stored version of each token; "" where none is stored."""
    found = [""] * len(row.response_ids)
    for span in row.versions:
        found[span.start : span.end] = [span.version] * (span.end - span.start)
    return found[: len(row.response_ids)]


def _runs(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending positions as half-open intervals."""
    runs: list[tuple[int, int]] = []
    for at in positions:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
