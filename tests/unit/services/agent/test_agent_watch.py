"""The watch over what runs in Ray."""

import pytest

from nightshift.wire.errors import RoleError
from services.agent.watch import RayWatch


class Scene:
    def __init__(self):
        self.now = 0.0
        self.cause = None
        self.asked = 0
        self.states = {"reward-a": ("ready", ""), "reference": ("ready", "")}
        self.events = []
        roles = {"reward-a": "reward", "reference": "reference"}
        self.watch = RayWatch(self.trainer, lambda: self.states, roles, self.report, clock=lambda: self.now)

    def trainer(self):
        if isinstance(self.cause, Exception):
            raise self.cause
        self.asked += 1

    def report(self, role, state, **fields):
        self.events.append((role, state, fields.get("detail")))


@pytest.fixture
def scene():
    return Scene()


def test_all_well_says_nothing(scene):
    scene.watch.ask()
    scene.watch.check()
    assert scene.events == []


def test_a_replaced_replica_is_reported_once_each_way(scene):
    scene.states["reward-a"] = ("restarting", "replica died\ntraceback")
    scene.watch.ask()
    scene.watch.ask()
    scene.states["reward-a"] = ("ready", "")
    scene.watch.ask()
    scene.watch.check()
    assert scene.events == [("reward", "restarting", "replica died"), ("reward", "ready", "")]


def test_every_round_asks_the_trainer_too(scene):
    scene.watch.ask()
    scene.watch.ask()
    assert scene.asked == 2


def test_a_lost_application_fails_with_its_role(scene):
    scene.states["reference"] = ("failed", "deleted")
    scene.watch.ask()
    with pytest.raises(RoleError, match=r"\[reference\] reference is gone from Serve: deleted"):
        scene.watch.check()


def test_errors_of_ray_are_borne_for_a_while(scene):
    scene.cause = ConnectionError("controller away")
    for now in (0.0, 10.0, 20.0):
        scene.now = now
        scene.watch.ask()
        scene.watch.check()
    scene.now = 20.1
    scene.watch.ask()
    with pytest.raises(RoleError, match="ConnectionError: controller away"):
        scene.watch.check()


def test_an_answer_between_errors_starts_the_count_anew(scene):
    for now in range(0, 100, 10):
        scene.now = float(now)
        scene.cause = ConnectionError() if now % 20 else ""
        scene.watch.ask()
        scene.watch.check()


def test_a_question_that_is_never_answered_fails_after_a_minute(scene):
    scene.watch.ask()
    scene.now = 60.0
    scene.watch.check()
    scene.now = 60.1
    with pytest.raises(RoleError, match="Ray has not answered for 60 s"):
        scene.watch.check()
