"""Several vLLM servers: each lives and dies for itself, and one that is given up does not end the run."""

import threading
import time

import pytest

from nightshift.wire.errors import RoleError
from services.agent.rollout_servers import RolloutServers


class FakeServer:
    """Becomes ready at once; lives until the test says otherwise."""

    def __init__(self, name):
        self.name = name
        self.starts = 0
        self.up = False
        self.broken = False

    def spawn(self):
        self.starts += 1
        self.up = not self.broken

    def wait_ready(self, cancelled=None):
        if self.broken:
            raise RoleError("no memory", role="rollout", fix="look")
        return 0.1

    def alive(self):
        return self.up

    def answers(self):
        return True

    def failure(self):
        return RoleError(f"{self.name} was killed", role="rollout", fix="look")

    def stop(self):
        self.up = False

    def kill(self):
        self.up = False

    def entry(self):
        return {"name": self.name, "incarnation": str(self.starts)}


class Scene:
    def __init__(self, count=2):
        self.servers = [FakeServer(f"rollout-{at}") for at in range(count)]
        self.events = []
        self.woken = threading.Event()
        self.roles = RolloutServers(
            self.servers, self.report, self.woken.set, stall_timeout_s=60.0, asked=lambda entry: None
        )

    def report(self, role, state, *, detail="", fix="", seconds=None):
        self.events.append((state, detail))

    def start(self, now):
        """Ticks at one moment until all are ready."""
        deadline = time.monotonic() + 60
        while not self.roles.ready:
            self.roles.tick(now)
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def let_fail(self, server, now):
        """Ticks until the server has ended for good, and gives the time then."""
        deadline = time.monotonic() + 60
        while server.name in [entry["name"] for entry in self.roles.entries()]:
            self.roles.tick(now)
            now += 5.0
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return now


def test_all_are_started_and_listed():
    scene = Scene()
    scene.roles.begin(0.0)
    scene.start(1.0)
    assert scene.roles.entries() == [
        {"name": "rollout-0", "incarnation": "1"},
        {"name": "rollout-1", "incarnation": "1"},
    ]
    assert not scene.roles.tick(2.0)


def test_one_that_dies_is_started_again_while_the_other_goes_on():
    scene = Scene()
    scene.roles.begin(0.0)
    scene.start(1.0)
    scene.servers[1].up = False
    scene.roles.tick(500.0)
    assert not scene.roles.ready
    scene.start(502.0)
    assert [server.starts for server in scene.servers] == [1, 2]
    assert ("restarting", "rollout-1 was killed") in scene.events


def test_one_that_keeps_dying_is_given_up_and_the_last_one_is_not():
    scene = Scene()
    scene.roles.begin(0.0)
    scene.start(1.0)
    bad = scene.servers[1]
    bad.up, bad.broken = False, True
    now = scene.let_fail(bad, 2.0)
    assert [entry["name"] for entry in scene.roles.entries()] == ["rollout-0"]
    state, detail = scene.events[-1]
    assert state == "retired"
    assert "rollout-1 is given up, the run goes on without it" in detail
    assert scene.roles.ready
    last = scene.servers[0]
    last.up, last.broken = False, True
    with pytest.raises(RoleError, match="ended"):
        scene.let_fail(last, now)


def test_a_first_start_that_fails_ends_it():
    scene = Scene()
    scene.servers[1].broken = True
    scene.roles.begin(0.0)
    with pytest.raises(RoleError, match="no memory"):
        scene.let_fail(scene.servers[1], 1.0)


def test_all_are_ended():
    scene = Scene(3)
    scene.roles.begin(0.0)
    scene.start(1.0)
    scene.roles.stop()
    assert not any(server.up for server in scene.servers)
