"""The books of a run, audited from outside: what was issued was trained once, or is accounted for. Pure.

Believed are the trainer's manifests, the stored rollouts and the request logs of the servers
(:mod:`nightshift.analysis.evidence`). Each rule that does not hold is a finding that names the group, sample or step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from nightshift.analysis.evidence import Evidence, Manifest, Row
from nightshift.analysis.findings import Audit, Finding
from nightshift.analysis.proof import Logged, prove
from nightshift.wire.errors import BadInputError, WireError
from nightshift.wire.version import Lineage, PolicyVersion


def audit(evidence: Evidence) -> Audit:
    """Audits a run.

    Raises:
        BadInputError: a manifest lacks what an audit needs, or a file cannot be read.
    """
    return _Auditor(evidence).run()


class _Auditor:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        newest = evidence.newest
        branches = tuple((int(number), int(step)) for number, step in _need(newest, "branches"))
        self._lineage = Lineage(str(_need(newest, "run_id")), newest["lineage"], branches)
        self._logged = Logged.of(evidence.log, self._lineage.run)
        self._found = Audit(self._lineage.run, newest["step"], newest["lineage"])
        self._found.servers = len(evidence.log.files)
        self._found.requests = sum(map(len, self._logged.lines.values()))
        self._consumed: dict[int, list[int]] = {}  # by step
        self._rules: dict[int, Mapping[str, Any]] = {}
        self._incomplete: dict[int, int] = {}
        cursor = _need(newest, "cursor")
        #: Whether the prompts came with a driver's requests (`nightshift.Trainer`): then none has a place of its own.
        self._driven = bool(cursor.get("driven"))
        self._epoch_rows = int(cursor.get("epoch_rows", cursor["size"]))
        #: Groups that one row may have in an epoch: more than one where its file has a weight above 1.
        self._turns = max(1, *(math.ceil(weight) for weight in cursor.get("weights") or [1]))
        self._positions: dict[tuple[int, str], set[int]] = defaultdict(set)
        self._samples: dict[str, int] = {}  # step of each

    def run(self) -> Audit:
        for manifest in self._evidence.manifests:
            if self._lineage.contains(self._version(manifest)):
                self._read(manifest)
        self._check_steps()
        self._account()
        stored: set[int] = set()
        for step, rows in self._evidence.rollouts:
            stored.add(step)
            if step > self._found.step:
                self._found.uncommitted.append(step)
            else:
                self._check_rows(step, rows)
        for step in sorted(self._consumed.keys() - stored):
            if step <= self._found.step:
                self._find("loss", f"step {step}", "its rollouts are not stored (tracking.rollouts)")
        if unreadable := self._evidence.log.unreadable:
            self._found.notes.append(
                f"{len(unreadable)} lines of request logs cannot be read, the first {unreadable[0]}"
            )
        return self._found

    # Manifests --------------------------------------------------------------------------------------------------------

    def _version(self, manifest: Manifest) -> PolicyVersion:
        return PolicyVersion(str(_need(manifest, "run_id")), manifest["lineage"], manifest["step"])

    def _read(self, manifest: Manifest) -> None:
        """Takes up what a commit in the history of the final weights says."""
        for name, indices in _need(manifest, "consumed").items():
            step = int(name)
            version = PolicyVersion(self._lineage.run, manifest["lineage"], step)
            if not self._lineage.contains(version):
                history = f"lineage {self._lineage.number} of the final weights"
                self._find(
                    "lineage", f"step {step}", f"lineage {manifest['lineage']} made it, which {history} left earlier"
                )
            if step in self._consumed:
                self._find("duplicate", f"step {step}", "two commits of the lineage say what it trained")
                continue
            self._consumed[step] = [int(index) for index in indices]
        self._rules |= {int(step): rules for step, rules in _need(manifest, "rules").items()}
        self._incomplete |= {int(index): int(count) for index, count in _need(manifest, "incomplete").items()}
        terms = _need(manifest, "ledger")
        trained = sum(map(len, self._consumed.values()))
        if terms["issued"] != sum(count for name, count in terms.items() if name != "issued"):
            self._find("books", f"step {manifest['step']}", f"the commit's counters do not add up: {terms}")
        if terms["trained"] != trained:
            said = f"the commit counts {terms['trained']} trained groups, the steps up to it trained {trained}"
            self._find("books", f"step {manifest['step']}", said)
        stepped = manifest.get("trainer", {}).get("optimizer_steps")  # the trainer's own count; not in the copies
        if stepped is not None and stepped != manifest["step"] - manifest.get("skipped", 0):
            said = f"the trainer made {stepped} optimiser steps for {manifest['step']} steps"
            self._find("books", f"step {manifest['step']}", f"{said}, {manifest.get('skipped', 0)} of them skipped")

    def _check_steps(self) -> None:
        others: dict[int, int] = {}
        for manifest in self._evidence.manifests:
            if not self._lineage.contains(self._version(manifest)):
                others |= {int(step): manifest["lineage"] for step in manifest.get("consumed", {})}
        for step in range(1, self._found.step + 1):
            if step in self._consumed:
                continue
            if step in others:
                said = f"only lineage {others[step]} says what it trained, which is no ancestor of the final weights"
                self._find("lineage", f"step {step}", said)
            else:
                self._find("loss", f"step {step}", "no commit says what it trained")

    def _account(self) -> None:
        """Every issued group has exactly one place."""
        newest = self._evidence.newest
        places: dict[int, str] = {}
        for step, indices in sorted(self._consumed.items()):
            for index in indices:
                if index in places:
                    said = f"step {step} trained it, and so did {places[index]}"
                    self._find("duplicate", _group(index), said)
                places[index] = f"step {step}"
        trained = len(places)
        groups: dict[str, list[int]] = {**_need(newest, "ended"), "in_flight": _need(newest, "in_flight")}
        for name, indices in groups.items():
            for index in indices:
                if index in places:
                    said = f"it is {name.replace('_', ' ')}, and {places[index]}"
                    self._find("duplicate", _group(index), said + (" trained it" if "step" in places[index] else ""))
                places[index] = name.replace("_", " ")
        issued = int(_need(newest, "issued"))
        for index in range(issued):
            if index not in places:
                said = "it was issued, and neither trained nor dropped, failed, cancelled or in flight"
                self._find("loss", _group(index), said)
        for index in sorted(places):
            if not 0 <= index < issued:
                self._find("books", _group(index), f"{places[index]}, but only {issued} groups were issued")
        self._found.accounts = {
            "issued": issued,
            "trained": trained,
            **{name: len(indices) for name, indices in groups.items()},
        }
        cursor = newest["cursor"]
        place = int(cursor["epoch"]) * self._epoch_rows + int(cursor["offset"])
        if place != issued and not self._driven:
            self._find("position", "the cursor", f"it stands behind {place} prompts, {issued} groups were issued")

    # Rows -------------------------------------------------------------------------------------------------------------

    def _check_rows(self, step: int, rows: Sequence[Row]) -> None:
        consumed = set(self._consumed.get(step, ()))
        slots: Counter[int] = Counter()
        for row in rows:
            index = _index(row.group_id)
            if index is None or index not in consumed:
                self._find("duplicate", row.sample_id, f"stored with step {step}, which did not train {row.group_id}")
                continue
            slots[index] += 1
            if row.sample_id in self._samples:
                said = f"stored with step {step}, and with step {self._samples[row.sample_id]}"
                self._find("duplicate", row.sample_id, said)
                continue
            self._samples[row.sample_id] = step
            self._check_position(index, row)
            self._check_row(step, index, row)
        n = int(self._rules.get(step, {}).get("n", 0))
        for index in sorted(consumed):
            wanted = self._incomplete.get(index, n)
            if slots[index] < wanted:
                said = f"step {step} trained it with {wanted} samples, {slots[index]} are stored"
                self._find("loss", _group(index), said)
            elif slots[index] > wanted:
                said = f"step {step} trained it with {wanted} samples, {slots[index]} are stored"
                self._find("duplicate", _group(index), said)
        self._found.groups += len(slots)

    def _check_position(self, index: int, row: Row) -> None:
        if self._driven:
            return
        epoch = index // self._epoch_rows
        if row.epoch != epoch:
            self._find("position", row.sample_id, f"stored as of epoch {row.epoch}, its place is in epoch {epoch}")
        groups = self._positions[row.epoch, row.row_id]
        if index not in groups and len(groups) == self._turns:
            said = f"prompt {row.row_id} of epoch {row.epoch} is that of {', '.join(map(_group, sorted(groups)))}, too"
            self._find("position", _group(index), said)
        groups.add(index)

    def _check_row(self, step: int, index: int, row: Row) -> None:
        self._found.samples += 1
        self._found.tokens += len(row.response_ids)
        if row.step != step:
            self._find("books", row.sample_id, f"stored in the file of step {step} as of step {row.step}")
        if not row.sample_id.startswith(f"{row.group_id}."):
            self._find("books", row.sample_id, f"stored as one of {row.group_id}")
        trained = self._parse(row.sample_id, row.trained_version)
        if trained is not None and (trained.step != step - 1 or not self._lineage.contains(trained)):
            said = f"step {step} trained the weights {trained}, which are not in the history of the final ones"
            self._find("lineage", row.sample_id, said)
        self._check_versions(step, row)
        proof = prove(row, self._logged)
        for first, last in proof.unproven:
            said = f"tokens {first} to {last - 1} of {len(row.response_ids)} were drawn by no server"
            self._find("tokens", row.sample_id, f"{said} behind the stored ones before them ({_lines(proof.lines)})")
        for first, stored, drawn in proof.other_versions[:1]:
            said = (
                f"{len(proof.other_versions)} tokens from {first} on are stored as drawn with {stored or 'no version'}"
            )
            self._find("version", row.sample_id, f"{said}, a server drew them with {drawn or 'unknown weights'}")
        for version in proof.never_held:
            self._find("version", row.sample_id, f"no server that drew with {version} had taken these weights before")
        if not proof.ended:
            said = f"no server ended it with {row.finish_reason!r} after {len(row.response_ids)} tokens"
            self._find("tokens", row.sample_id, f"{said} ({_lines(proof.lines)})")

    def _check_versions(self, step: int, row: Row) -> None:
        """Each token is of an ancestor, and not too old for its step."""
        bound = self._rules.get(step, {}).get("max_staleness")
        at = 0
        for span in row.versions:
            if span.start != at or span.end <= at:
                break
            at = span.end
            version = self._parse(row.sample_id, span.version)
            if version is None:
                continue
            age = step - 1 - version.step
            if not self._lineage.contains(version) or age < 0:
                said = f"step {step} trained tokens of {version}, which is not in the history of its weights"
                self._find("lineage", row.sample_id, said)
            elif bound is not None and age > bound:
                said = f"token {span.start} is {age} versions older than the weights that step {step} trained"
                self._find("stale", row.sample_id, f"{said}; at most {bound} are allowed")
            else:
                self._found.oldest = max(self._found.oldest, age)
        if at != len(row.response_ids):
            self._find("version", row.sample_id, f"the stored versions end at token {at} of {len(row.response_ids)}")

    def _parse(self, sample_id: str, text: str) -> PolicyVersion | None:
        try:
            return PolicyVersion.parse(text)
        except WireError as error:
            self._find("version", sample_id, error.message)
            return None

    def _find(self, kind: str, subject: str, message: str) -> None:
        self._found.findings.append(Finding(kind, subject, message))


def _need(manifest: Manifest, name: str) -> Any:
    """A field of a manifest.

    Raises:
        BadInputError: it is not there.
    """
    if name not in manifest:
        raise BadInputError(
            f"the manifest of step {manifest.get('step')} has no {name!r}",
            fix="Only runs that draw rollouts are audited, and only those of this version",
        )
    return manifest[name]


def _group(index: int) -> str:
    return f"g{index:07d}"


def _index(group_id: str) -> int | None:
    """The issue number of a group."""
    digits = group_id.removeprefix("g")
    return int(digits) if digits.isdigit() else None


def _lines(count: int) -> str:
    return f"the request logs have {count} lines of it" if count != 1 else "the request logs have 1 line of it"
