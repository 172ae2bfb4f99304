"""The scheduler's looks: what fails for one job keeps nothing from the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from nightshift.cli.tail import Tail
from orchestrator.jobs.lending import Lender
from orchestrator.jobs.scheduler import Scheduler, SchedulerConfig
from orchestrator.jobs.states import Happening, observe
from orchestrator.store.access import AccessStore
from orchestrator.store.engine import connect
from orchestrator.store.jobs import JobStore, NewJob


class Looks(Lender):
    """Counts the looks at fleets."""

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> None:
        self.count += 1


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return connect(f"sqlite:///{tmp_path / 'state.db'}")


def scheduler(engine: Engine, lender: Lender) -> tuple[JobStore, Scheduler]:
    jobs = JobStore(engine)
    return jobs, Scheduler(
        jobs, AccessStore(engine), SchedulerConfig(command=["true"], owner="me", first_word_s=0.0), lender=lender
    )


def test_a_job_that_cannot_be_followed_keeps_no_other_from_its_servers(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = Looks()
    jobs, looking = scheduler(engine, lender)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").touch()
        jobs.create(NewJob(name, "p", "job", str(tmp_path / name), {}, "h"))
        jobs.change(name, lambda status: observe(status, Happening.LAUNCHED))
    read: list[str] = []

    def broken(tail: Tail) -> list[dict[str, object]]:
        read.append(tail._path.parent.name)
        if read[-1] == "a":
            raise PermissionError("the disk is strange")
        return []

    monkeypatch.setattr(Tail, "read", broken)
    looking.tick()  # takes over what another orchestrator left
    looking.tick()
    looking.tick()
    assert {"a", "b"} <= set(read)
    assert lender.count == 3


def test_a_database_that_is_away_ends_the_look(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    lender = Looks()
    jobs, looking = scheduler(engine, lender)

    def away() -> list[object]:
        raise OperationalError("SELECT 1", {}, Exception("gone"))

    monkeypatch.setattr(jobs, "active", away)
    with pytest.raises(OperationalError):
        looking.tick()
    assert lender.count == 0
