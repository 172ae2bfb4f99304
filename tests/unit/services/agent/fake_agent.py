"""The agent with fake parts: ``python fake_agent.py RUN_DIR SCENARIO``; no port and no model is used."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

from nightshift.wire.errors import BadInputError, RoleError
from services.agent.parts import Parts
from services.agent.supervisor import ROLES, Supervisor
from services.rollout.keeper import die_with_parent

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


class Server:
    """A server that is a sleeping process."""

    def __init__(self, scenario, name="rollout-0"):
        self.scenario = scenario
        self.name = name
        self.starts = 0
        self.process = None

    def spawn(self):
        self.starts += 1
        self.process = subprocess.Popen(SLEEPER)

    def wait_ready(self, cancelled=None):
        if self.scenario == "rollout never ready":
            cancelled.wait(600)
        if self.scenario == "rollout fails":
            raise RoleError("ValueError: no such head size", role="rollout", fix="Take another model")
        return 0.1

    def alive(self):
        return self.process.poll() is None

    def answers(self):
        return True

    def failure(self):
        return RoleError(f"ended by signal {-self.process.poll()}", role="rollout")

    def stop(self):
        self.process.kill()
        self.process.wait()

    def kill(self):
        self.process.kill()

    def entry(self):
        return {
            "name": self.name,
            "url": "http://x",
            "token": "secret",
            "incarnation": str(self.starts),
            "weight_backend": "safetensors",
            "pid": self.process.pid,
        }


class Trainer:
    """A trainer that is a sleeping process."""

    url = "grpc://trainer"

    def __init__(self, log):
        self.log = log
        self.process = subprocess.Popen(SLEEPER)

    def failure(self):
        return "" if self.process.poll() is None else "rank 0 died"

    def stop(self):
        self.log("trainer stopped")
        self.process.kill()


class FakeParts(Parts):
    """All parts, with a record of what was done in which order."""

    def __init__(self, run_dir, scenario):
        self.run_dir = run_dir
        self.scenario = scenario

    def log(self, text):
        with (self.run_dir / "order").open("a") as file:
            file.write(text + "\n")

    def port(self, role, wanted):
        if self.scenario == "port taken" and role == "scorers":
            raise BadInputError("port 1 is taken", role=role, fix="Set another one")
        return wanted or 1

    def server(self, spec, **arguments):
        store = arguments["store"]
        self.log(f"store exists: {store.is_dir()}" if store else f"weights from {arguments['weights_url']}")
        return Server(self.scenario, arguments["name"])

    def weight_server(self, store, host, port):
        self.log(f"weights on {host}:{port}")
        parts = self

        class Files:
            url = "http://trainer/weights"
            token = "files"

            def start(self):
                parts.log("weights served")

            def stop(self):
                parts.log("weights stopped")

        return Files()

    def cluster(self, spec, run_dir, environment, gpus):
        parts = self

        class Cluster:
            metrics: ClassVar[list[str]] = ["127.0.0.1:7"]

            def start(self):
                # As Ray's: whose handler answers SIGTERM until the agent's is back.
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
                if parts.scenario in ("slow ray", "rollout fails"):
                    time.sleep(600)
                parts.log("ray started")

            def failure(self):
                return "Ray's process raylet has ended" if (parts.run_dir / "ray_dead").exists() else ""

            def stop(self):
                parts.log("ray stopped")

        return Cluster()

    def deploy(self, spec, port, otlp, run_id):
        if self.scenario == "bad reward":
            raise BadInputError("reward.py has no function 'f'", role="reward", fix="Correct it")
        if self.scenario in ("trainer fails", "stuck deploy"):
            threading.Event().wait(600)
        return {
            "rewards": [{"name": "f", "url": "grpc://s", "application": "reward-f"}],
            "reference": None,
            "critic": None,
        }

    def undeploy(self):
        self.log("scorers stopped")
        if self.scenario == "bug at the end":
            raise ValueError("cannot")

    def scorer_states(self, applications):
        path = self.run_dir / "scorer_state"
        state = json.loads(path.read_text()) if path.exists() else ["ready", ""]
        return {name: tuple(state) for name in applications}

    def trainer(self, spec, port, store, otlp, run_id, gpus):
        if self.scenario == "trainer fails":
            raise RoleError("out of memory", role="trainer", fix="Take fewer ranks")
        if self.scenario == "bug":
            raise KeyError("odd")
        (store / "1.safetensors").write_text("weights")
        return Trainer(self.log)


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    die_with_parent(signal.SIGTERM)
    roles = frozenset(sys.argv[3].split(",")) if len(sys.argv) > 3 else frozenset(ROLES)
    sys.exit(Supervisor(run_dir, None, FakeParts(run_dir, sys.argv[2]), roles).run())
