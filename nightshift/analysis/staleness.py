"""How old what was trained on was: versions of the policy between a token and the update that used it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Staleness:
    """Counts per age in versions. The age of a sample or a group is that of its oldest token.

    Attributes:
        unknown: samples that carry no version.
    """

    groups: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    unknown: int = 0

    @property
    def most(self) -> int | None:
        """The greatest age of a token; None where none is known."""
        return max(self.samples, default=None)

    @property
    def mean(self) -> float | None:
        """Mean age over samples; None where none is known."""
        count = sum(self.samples.values())
        return sum(age * number for age, number in self.samples.items()) / count if count else None


def staleness(rows: Iterable[Mapping[str, Any]]) -> Staleness:
    """Ages from stored rollouts.

    Args:
        rows: one per sample, with step, group_id, trained_version, versions (str per span), version_starts (int per
            span) and response_tokens; a row that lacks its versions counts as unknown.
    """
    groups: dict[tuple[Any, Any], int] = {}
    samples: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    unknown = 0
    for row in rows:
        trained = _step(row.get("trained_version"))
        steps = [_step(version) for version in row.get("versions") or ()]
        known = [step for step in steps if step is not None]
        if trained is None or not known or len(known) != len(steps):
            unknown += 1
            continue
        age = trained - min(known)
        samples[age] += 1
        key = (row.get("step"), row.get("group_id"))
        groups[key] = max(age, groups.get(key, age))
        for step, count in zip(known, _lengths(row, len(known)), strict=False):
            tokens[trained - step] += count
    return Staleness(_sorted(Counter(groups.values())), _sorted(samples), _sorted(+tokens), unknown)


def _lengths(row: Mapping[str, Any], spans: int) -> list[int]:
    """Tokens of each version span; none where the row does not say where spans begin."""
    starts: Sequence[int] = row.get("version_starts") or ()
    total = row.get("response_tokens")
    if len(starts) != spans or total is None:
        return []
    return [end - start for start, end in zip(starts, [*starts[1:], int(total)], strict=True)]


def _step(version: Any) -> int | None:
    """The step of ``<run>/<lineage>/<step>``."""
    text = str(version or "").rpartition("/")[2]
    return int(text) if text.isdigit() else None


def _sorted(counts: Mapping[int, int]) -> dict[int, int]:
    return dict(sorted(counts.items()))
