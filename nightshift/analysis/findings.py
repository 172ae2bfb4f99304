"""What an audit finds, and in which kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

#: Kinds of findings, and what each means.
KINDS = {
    "duplicate": "a group or sample was used twice",
    "loss": "a group or sample is missing",
    "position": "a group is not the one that its place in the prompts makes it",
    "lineage": "a step or token does not belong to the history of the final weights",
    "stale": "a token is older than the staleness bound",
    "version": "a token was drawn with other weights than it says, or with weights that were never published",
    "tokens": "stored tokens are not those that a server drew",
    "books": "counters disagree",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not hold."""

    kind: str  # one of KINDS
    subject: str  # the step, group or sample
    message: str


@dataclass(slots=True)
class Audit:
    """What an audit found.

    Attributes:
        step, lineage: of the final weights.
        accounts: terms of ``issued = trained + dropped_stale + … + in_flight``.
        oldest: versions between the oldest trained token and the weights that its step trained.
        servers, requests: what the request logs hold of this run.
        uncommitted: stored steps that no commit holds yet.
        notes: what is worth knowing and is no fault.
    """

    run_id: str
    step: int
    lineage: int
    accounts: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    oldest: int = 0
    servers: int = 0
    requests: int = 0
    uncommitted: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def balanced(self) -> bool:
        """Whether everything holds."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for programs."""
        return {"balanced": self.balanced, **asdict(self)}


def summary(findings: Iterable[Finding]) -> dict[str, int]:
    """Findings by kind."""
    counts = Counter(finding.kind for finding in findings)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}
