"""The trainer as a role: first start, restarts with the old one out of the way, giving up."""

import threading

import pytest

from nightshift.restarts import RestartPolicy
from nightshift.wire.errors import RoleError
from services.agent.trainer_role import TrainerRole


class FakeTrainer:
    def __init__(self, number, order):
        self.url = f"grpc://trainer-{number}"
        self.cause = ""
        self.order = order

    def failure(self):
        return self.cause

    def stop(self):
        self.order.append(f"stop {self.url[-1]}")


class Scene:
    def __init__(self):
        self.order = []
        self.trainers = []
        self.events = []
        self.problem = None
        self.woken = threading.Event()
        self.role = TrainerRole(self.start, self.report, self.woken.set, 30.0, RestartPolicy(limit=3, early_s=20.0))

    def start(self):
        self.order.append("start")
        if self.problem:
            raise self.problem
        self.trainers.append(FakeTrainer(len(self.trainers) + 1, self.order))
        return self.trainers[-1]

    def report(self, role, state, *, detail="", fix="", seconds=None):
        self.events.append((state, detail))

    def begin(self):
        self.role.begin()
        self.role.wait_ready()
        self.now = self.role._ready_at

    def die(self, after):
        """The trainer fails ``after`` seconds in which it was well."""
        self.now += after
        self.trainers[-1].cause = "[trainer] rank 0 died"
        self.role.ask()
        self.woken.clear()
        return self.role.tick(self.now)

    def come_back(self, after=1.0):
        self.now += after
        assert not self.role.tick(self.now)
        assert self.woken.wait(10)
        return self.role.tick(self.now)


@pytest.fixture
def scene():
    scene = Scene()
    scene.begin()
    return scene


def test_it_has_an_address_once_it_is_ready(scene):
    assert scene.role.entry() == {"url": "grpc://trainer-1", "incarnation": "1"}
    assert scene.events == [("starting", ""), ("ready", "")]


@pytest.mark.parametrize("error", [RoleError("no", role="trainer"), ValueError("odd")])
def test_a_failed_first_start_is_final(error):
    scene = Scene()
    scene.problem = error
    scene.role.begin()
    with pytest.raises(type(error)):
        scene.role.wait_ready()


def test_a_dead_one_is_ended_before_the_next_starts(scene):
    assert not scene.die(100.0)
    assert scene.role.entry() is None
    assert scene.events[-1] == ("restarting", "rank 0 died")
    assert not scene.role.tick(scene.now + 0.9)
    assert scene.order == ["start"]
    assert scene.come_back()
    assert scene.order == ["start", "stop 1", "start"]
    assert scene.role.entry() == {"url": "grpc://trainer-2", "incarnation": "2"}
    assert scene.events[-1][0] == "ready"


def test_what_the_old_one_said_does_not_count_for_the_new_one(scene):
    scene.die(100.0)
    scene.come_back()
    assert not scene.role.tick(scene.now)
    assert scene.role.entry() is not None


def test_a_failed_start_counts_as_an_early_death(scene):
    scene.die(1.0)
    scene.problem = RoleError("no memory", role="trainer")
    scene.now += 1.0
    assert not scene.role.tick(scene.now)
    assert scene.woken.wait(10)
    assert not scene.role.tick(scene.now)
    assert scene.events[-1] == ("restarting", "no memory")
    scene.woken.clear()
    scene.now += 2.0
    scene.role.tick(scene.now)
    assert scene.woken.wait(10)
    with pytest.raises(RoleError, match="3 times within 20 s of its start, last so: no memory"):
        scene.role.tick(scene.now)


def test_late_deaths_are_forgiven(scene):
    for _ in range(6):
        scene.die(60.0)
        assert scene.come_back()
