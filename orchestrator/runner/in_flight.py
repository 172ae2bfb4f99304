"""Prompt groups between their start and the end of their step, with the counts that decisions need. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nightshift.algorithms.staleness import GroupAge
from nightshift.wire.errors import NightshiftError
from orchestrator.runner.group import Group
from orchestrator.runner.ledger import GroupRecord


@dataclass
class PipelineState:
    """What issuing and training both see.

    Attributes:
        running: groups that are generated or scored.
        ready: scored groups that no update has been given.
        open: groups that the update of the step in progress has been given; the step trains all of them or none.
        buffered_bytes: experience of the ready and the open groups.
        versions: version -> number of running groups that started at it.
        backlog: groups that ran at the last commit and start again as soon as the staleness bound allows.
        failed_in_row: why groups failed since the last one that was scored.
        failing_since: groups that had been issued when the first of those failed.
        failures: why groups failed since the last part of an update.
        filtered_in_row: groups left out in a row because their rewards were all equal.
    """

    running: dict[int, Group] = field(default_factory=dict)
    ready: dict[int, Group] = field(default_factory=dict)
    open: dict[int, Group] = field(default_factory=dict)
    buffered_bytes: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    backlog: deque[GroupRecord] = field(default_factory=deque)
    failed_in_row: list[NightshiftError] = field(default_factory=list)
    failing_since: int = 0
    failures: list[NightshiftError] = field(default_factory=list)
    filtered_in_row: int = 0
    _ages: dict[int, GroupAge] = field(default_factory=dict)  # of the ready groups: reading versions takes a while
    _bytes: dict[int, int] = field(default_factory=dict)  # as they were counted: advantages come later

    def start(self, group: Group) -> None:
        """Takes a group that begins to run."""
        self.running[group.index] = group
        self.versions[group.started_version] += 1

    def end(self, index: int) -> Group:
        """Lets a running group go."""
        group = self.running.pop(index)
        self.versions[group.started_version] -= 1
        if not self.versions[group.started_version]:
            del self.versions[group.started_version]
        return group

    def put(self, group: Group) -> None:
        """Takes a scored group."""
        self.ready[group.index] = group
        self._ages[group.index] = GroupAge(group.oldest_version, group.index)
        self._bytes[group.index] = size = group.bytes
        self.buffered_bytes += size

    def open_with(self, ages: Iterable[GroupAge]) -> list[Group]:
        """Moves ready groups into the step in progress."""
        groups = [self.ready.pop(age.order) for age in ages]
        for group in groups:
            del self._ages[group.index]
            self.open[group.index] = group
        return groups

    def remove(self, index: int) -> Group:
        """Lets a ready group go."""
        group = self.ready.pop(index)
        del self._ages[index]
        self.buffered_bytes -= self._bytes.pop(index)
        return group

    def close(self) -> None:
        """The step in progress has trained its groups."""
        self.buffered_bytes -= sum(self._bytes.pop(index) for index in self.open)
        self.open = {}

    def ready_ages(self) -> list[GroupAge]:
        """Ages of the ready groups."""
        return list(self._ages.values())

    def all_ages(self) -> list[GroupAge]:
        """Ages of all groups that the step in progress does not hold."""
        running = (GroupAge(group.started_version, index) for index, group in self.running.items())
        return [*self._ages.values(), *running]

    def running_up_to(self, version: int) -> int:
        """Running groups that started at this version or an older one."""
        return sum(count for started, count in self.versions.items() if started <= version)
