"""The vLLM server as a role: first start, restarts, giving up."""

import threading

import pytest

from nightshift.restarts import RestartPolicy
from nightshift.wire.errors import RoleError
from services.agent.pulse import Pulse
from services.agent.rollout_role import RolloutRole


class FakeServer:
    """Becomes ready, or fails, when the test says so."""

    def __init__(self):
        self.starts = 0
        self.stops = 0
        self.up = False
        self.outcome = None
        self.kills = 0
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

    def answers(self):
        return True

    def failure(self):
        return RoleError("killed", role="rollout", fix="look")

    def stop(self):
        self.stops += 1
        self.up = False

    def kill(self):
        self.kills += 1

    def entry(self):
        return {"name": "rollout-0", "incarnation": str(self.starts)}


class FakePulse:
    """Says how long the server has been silent as the test wants it."""

    def __init__(self, ask):
        self.ask = ask
        self.silent = 0.0
        self.running = False

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def silent_s(self):
        return self.silent


class Scene:
    def __init__(self):
        self.server = FakeServer()
        self.events = []
        self.woken = threading.Event()
        self.wanted = {}
        self.pulses = []
        self.role = RolloutRole(
            self.server,
            self.report,
            self.woken.set,
            RestartPolicy(),
            stall_timeout_s=20.0,
            asked=lambda entry: self.wanted.pop(entry["incarnation"], None),
            pulse=self.pulse,
        )

    def pulse(self, ask):
        self.pulses.append(FakePulse(ask))
        return self.pulses[-1]

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
    assert scene.server.entry()["incarnation"] == "2"


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


def test_a_silent_server_is_killed_and_started_again(scene):
    scene.role.begin(0.0)
    scene.decide(1.0, 1.0)
    (pulse,) = scene.pulses
    assert pulse.running
    assert pulse.ask()
    pulse.silent = 20.0
    assert not scene.role.tick(100.0)
    assert scene.server.kills == 0
    pulse.silent = 20.5
    scene.role.tick(101.0)
    assert scene.server.kills == 1
    assert not pulse.running
    assert scene.events[-1] == (
        "restarting",
        "vLLM server rollout-0 hangs: its health check had no answer for 20 s",
        1.0,
    )
    scene.role.tick(102.0)
    assert scene.server.starts == 2
    assert scene.decide(1.0, 103.0)
    assert scene.pulses[1].running
    assert not scene.role.tick(104.0)


def test_a_server_that_somebody_wants_started_again_is(scene):
    scene.role.begin(0.0)
    scene.decide(1.0, 1.0)
    scene.wanted["0"] = "an earlier start"
    scene.role.tick(99.0)
    scene.wanted["1"] = "drew no token for 120 s with 4 requests"
    scene.role.tick(100.0)
    assert scene.server.kills == 1
    assert "hangs: drew no token" in scene.events[-1][1]
    scene.role.tick(101.0)
    assert scene.server.starts == 2


def test_a_server_that_hangs_again_and_again_ends_it(scene):
    def hang(at):
        scene.decide(1.0, at)
        scene.wanted[str(scene.server.starts)] = "stuck"
        scene.role.tick(at + 1.0)

    scene.role.begin(0.0)
    hang(0.0)
    scene.role.tick(10.0)
    hang(10.0)
    scene.role.tick(20.0)
    with pytest.raises(RoleError, match=r"ended 3 times .* last so: vLLM server rollout-0 hangs"):
        hang(20.0)


def test_a_pulse_counts_from_the_last_answer():
    times = iter([0.0, 5.0, 5.0, 30.0])
    answers = iter([True, False])
    asked = threading.Event()

    def ask():
        answer = next(answers, None)
        if answer is None:
            asked.set()
        return bool(answer)

    pulse = Pulse(ask, clock=lambda: next(times), period_s=0.001)
    pulse.start()
    assert asked.wait(10)
    pulse.stop()
    assert pulse.silent_s() == 0.0  # the clock stands at the time of the one answer
    assert pulse.silent_s() == 25.0
