"""The vLLM server as a role: first start, restarts, giving up."""

import threading

import pytest

from nightshift.restarts import RestartPolicy
from nightshift.wire.errors import RoleError
from services.agent.rollout_role import RolloutRole


class FakeServer:
    """Becomes ready, or fails, when the test says so."""

    def __init__(self):
        self.starts = 0
        self.stops = 0
        self.up = False
        self.outcome = None
        self.decided = threading.Event()

    def spawn(self):
        self.starts += 1
        self.up = True
        self.decided = threading.Event()

    def wait_ready(self, cancelled=None):
        self.decided.wait(10)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def alive(self):
        return self.up

    def failure(self):
        return RoleError("killed", role="rollout", fix="look")

    def stop(self):
        self.stops += 1
        self.up = False

    def entry(self):
        return {"incarnation": str(self.starts)}


class Scene:
    def __init__(self):
        self.server = FakeServer()
        self.events = []
        self.woken = threading.Event()
        self.role = RolloutRole(self.server, self.report, self.woken.set, RestartPolicy())

    def report(self, role, state, *, detail="", fix="", seconds=None):
        self.events.append((state, detail, seconds))

    def decide(self, outcome, now):
        self.woken.clear()
        self.server.outcome = outcome
        self.server.decided.set()
        assert self.woken.wait(10)
        return self.role.tick(now)


@pytest.fixture
def scene():
    return Scene()


def test_a_server_becomes_ready_once(scene):
    scene.role.begin(0.0)
    assert not scene.role.tick(1.0)
    assert scene.decide(12.5, 13.0)
    assert scene.role.ready
    assert not scene.role.tick(14.0)
    assert scene.events == [("starting", "", None), ("ready", "", 12.5)]


@pytest.mark.parametrize("error", [RoleError("no", role="rollout"), ValueError("odd")])
def test_a_failed_first_start_is_final(scene, error):
    scene.role.begin(0.0)
    with pytest.raises(RoleError):
        scene.decide(error, 1.0)
    assert scene.server.stops == 1


def test_a_dead_server_is_started_again_after_a_pause_with_a_new_address(scene):
    scene.role.begin(0.0)
    scene.decide(1.0, 1.0)
    scene.server.up = False
    assert not scene.role.tick(500.0)
    assert scene.events[-1] == ("restarting", "killed", 1.0)
    assert scene.server.stops == 1
    scene.role.tick(500.9)
    assert scene.server.starts == 1
    scene.role.tick(501.0)
    assert scene.server.starts == 2
    assert scene.decide(2.0, 503.0)
    assert scene.server.entry() == {"incarnation": "2"}


def test_three_early_deaths_end_it_whether_ready_or_not(scene):
    scene.role.begin(0.0)
    scene.decide(1.0, 1.0)
    scene.server.up = False
    scene.role.tick(2.0)
    scene.role.tick(3.0)
    assert not scene.decide(RoleError("port taken", role="rollout"), 4.0)
    scene.role.tick(6.0)
    scene.decide(1.0, 7.0)
    scene.server.up = False
    with pytest.raises(RoleError, match="ended 3 times within 20 s of its start, last so: killed"):
        scene.role.tick(8.0)


def test_a_start_that_was_stopped_reports_nothing_more(scene):
    scene.role.begin(0.0)
    scene.role.stop()
    scene.server.outcome = RoleError("stopped", role="rollout")
    scene.server.decided.set()
    assert not scene.woken.wait(0.2)
    assert scene.role.failed is None
