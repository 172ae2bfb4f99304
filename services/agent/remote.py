"""Roles of a run that an agent on another host starts: asked for, watched, and ended with the run.

What is needed of that agent is in :mod:`services.agent.host`. The two share no folder: job and reward functions travel
with the request, weights by HTTP from the trainer's host to the rollout servers, checkpoints by the runner.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from nightshift.config.files import is_remote, local_files
from nightshift.config.job import JobSpec
from nightshift.config.resources import AgentsConfig
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.events import EventLog
from nightshift.wire.listen import LOOPBACK

#: The token that agents ask for, on both sides.
TOKEN_VARIABLE = "NIGHTSHIFT_AGENT_TOKEN"
_POLL_S = 1.0
_CALL_S = 20.0
_MIB = 1 << 20
#: Largest file that travels with a job.
_MAX_FILE = 16 * _MIB


def remote_agents(
    spec: JobSpec,
    run_dir: Path,
    roles: frozenset[str],
    otlp: str | None,
    *,
    events: EventLog,
    wake: Callable[[], None],
) -> list[RemoteAgent]:
    """The agents that a job's roles are left to; one for all roles with one address."""
    agents = spec.resources.agents
    by_url: dict[str, set[str]] = {}
    for role in sorted(roles):
        by_url.setdefault(str(getattr(agents, role)), set()).add(role)
    return [
        RemoteAgent(url, frozenset(part), spec, run_dir, otlp, events=events, wake=wake) for url, part in by_url.items()
    ]


def request_of(spec: JobSpec, roles: frozenset[str], otlp: str | None, url: str) -> dict[str, Any]:
    """What an agent is asked: the job, the functions that it names, and where spans go.

    Raises:
        BadInputError: a file cannot travel.
    """
    job = spec.model_copy(deep=True)
    job.resources.agents = AgentsConfig()
    if not job.is_preference and not job.rollout.own_servers:
        job.rollout.weight_transfer = "http"
    files: dict[str, str] = {}
    for field, text, put in list(local_files(job)):
        if field.startswith("data.") or is_remote(text):
            continue  # the runner reads the data
        path = Path(text)
        if not path.is_file() or path.stat().st_size > _MAX_FILE:
            raise BadInputError(f"{field} names {text!r}, which is no file of up to 16 MiB", role="job")
        name = f"{len(files)}/{path.name}"
        files[name] = base64.b64encode(path.read_bytes()).decode()
        put(f"inputs/{name}")
    return {
        "job": yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False),
        "files": files,
        "roles": sorted(roles),
        "otlp": _endpoint(spec, otlp, url),
    }


def _endpoint(spec: JobSpec, otlp: str | None, url: str) -> str | None:
    """The runner's receiver of spans as the other host reaches it; None where it cannot."""
    if not otlp:
        return None
    host = spec.resources.otlp_host
    if host not in LOOPBACK:
        return f"http://{host}:{urlsplit(otlp).port}"
    return otlp if urlsplit(url).hostname in LOOPBACK else None


class RemoteAgent:
    """One agent on another host, for one run. A thread asks it; the others read what it said.

    Attributes:
        url: where it is.
        addresses: the part of ``services.json`` that its roles make up; empty before they answer.
        weights: where its trainer's weights are served, as rollout servers are told; None: nowhere.
        error: why its roles cannot go on; None while they can.
    """

    def __init__(
        self,
        url: str,
        roles: frozenset[str],
        spec: JobSpec,
        run_dir: Path,
        otlp: str | None,
        *,
        events: EventLog,
        wake: Callable[[], None],
        away_s: float | None = None,
    ) -> None:
        """Prepares a request.

        Args:
            otlp: the run's receiver of spans.
            wake: called from the thread when something has changed.
            away_s: how long the agent may be away; None: ``pipeline.role_timeout_s``.

        Raises:
            BadInputError: no token is set, or a file of the job cannot travel.
        """
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise BadInputError(
                f"the agent at {url} asks for a token, and {TOKEN_VARIABLE} is not set",
                role="agent",
                fix=f"Set {TOKEN_VARIABLE} to the token that the agent was started with",
            )
        self.url = url.rstrip("/")
        self.addresses: dict[str, Any] = {}
        self.weights: dict[str, str] | None = None
        self.error: NightshiftError | None = None
        self._token = token
        self._roles = roles
        self._run_id = run_dir.name
        self._request = request_of(spec, roles, otlp, url)
        self._events = events
        self._wake = wake
        self._away_s = spec.pipeline.role_timeout_s if away_s is None else away_s
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"},
            timeout=_CALL_S,
            trust_env=urlsplit(url).hostname not in LOOPBACK,
        )
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._changed = False
        self._seen = 0  # events of the other agent
        self._session = ""
        self._thread = threading.Thread(target=self._run, name=f"agent {url}", daemon=True)

    def start(self) -> None:
        """Asks for the roles and returns at once."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until all roles answer.

        Raises:
            NightshiftError: one of them could not be started.
            RoleTimeoutError: they took too long.
        """
        if not self._ready.wait(timeout_s) and self.error is None:
            raise RoleTimeoutError(
                f"the agent at {self.url} did not bring up {' and '.join(sorted(self._roles))} within {timeout_s:g} s",
                role="agent",
                fix="See its log on that host",
            )
        if self.error is not None:
            raise self.error
        self._changed = False

    def changed(self) -> bool:
        """Whether the addresses are others since the last call.

        Raises:
            NightshiftError: the roles cannot go on.
        """
        if self.error is not None:
            raise self.error
        changed, self._changed = self._changed, False
        return changed

    def stop(self) -> None:
        """Ends the roles there; an agent that is away ends them by itself, since nobody asks for them any more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CALL_S)
        try:
            self._client.delete(self._run_url)
        except httpx.HTTPError:
            return
        finally:
            self._client.close()

    # The thread -------------------------------------------------------------------------------------------------------

    @property
    def _run_url(self) -> str:
        return f"{self.url}/v1/runs/{self._run_id}"

    def _run(self) -> None:
        heard = time.monotonic()
        asked = False
        while not self._stop.is_set():
            cause = ""
            try:
                if not asked:
                    answer = self._client.put(self._run_url, json=self._request)
                    self._check(answer)
                    asked = True
                answer = self._client.get(self._run_url, params={"session": self._session, "events": self._seen})
                if answer.status_code == 404:  # it was started again, and remembers no run
                    asked = False
                    self._take({"state": "starting", "session": "", "events": [], "next": 0})
                else:
                    self._check(answer)
                    self._take(answer.json())
                    heard = time.monotonic()
            except httpx.HTTPError as error:
                cause = f"{type(error).__name__}: {error}"
            except NightshiftError as error:
                self._fail(error)
            except Exception as error:  # an answer of another program
                self._fail(RoleError(f"the agent at {self.url} gave no sense: {error!r}", role="agent"))
            if self.error is not None:
                return
            if time.monotonic() - heard > self._away_s:
                said = f"the agent at {self.url} did not answer for {self._away_s:g} s ({cause or 'it lost the run'})"
                self._fail(RoleTimeoutError(said, role="agent", fix="Start it, or correct resources.agents"))
                return
            self._stop.wait(_POLL_S)

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        if answer.status_code >= 500:
            raise httpx.ReadError(f"it answered {answer.status_code}")
        try:
            problem = answer.json()["error"]
            text, fix = str(problem["message"]), str(problem.get("fix", ""))
        except (ValueError, KeyError, TypeError):
            text, fix = f"it answered {answer.status_code}: {answer.text[:200]}", ""
        raise BadInputError(f"the agent at {self.url} refuses the run: {text}", role="agent", fix=fix)

    def _take(self, status: dict[str, Any]) -> None:
        for event in status["events"]:
            if event["kind"] == "role" and (event.get("role") == "agent" or event.get("state") == "failed"):
                continue  # of its own life; what failed is said once, by this agent
            fields = {key: value for key, value in event.items() if key not in ("kind", "time", "run_id")}
            self._events.append(event["kind"], **fields)
        self._seen = int(status["next"])
        if status["session"] != self._session:
            self._session = status["session"]
            self._put({}, None)
        if status["state"] == "ended":
            found = [e for e in status["events"] if e["kind"] == "role" and e.get("state") == "failed"]
            why = str(found[-1].get("detail")) if found else f"it ended with code {status.get('code')}"
            fix = str(found[-1].get("fix", "")) if found else ""
            role = str(found[-1].get("role", "agent")) if found else "agent"
            kind = BadInputError if status.get("code") == 2 else RoleError
            self._fail(kind(why, role=role, fix=fix or f"See logs/agent.log on {self.url}"))
        elif status["state"] == "ready":
            self._put(*self._addresses_of(status))

    def _addresses_of(self, status: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str] | None]:
        services, token = status["services"], status["token"]
        found: dict[str, Any] = {}
        if "scorers" in self._roles:
            found["rewards"] = [_called(entry, status) for entry in services["rewards"]]
            for role in ("reference", "teacher", "critic"):
                found[role] = _called(services.get(role), status)
        if "trainer" in self._roles:
            trainer = services.get("trainer")
            found["trainer"] = trainer and {
                **trainer,
                "token": token,
                # Another start of the agent is another trainer, and counts its starts from 1 again.
                "incarnation": f"{self._session}-{trainer['incarnation']}",
                "files": {"url": f"{self._run_url}/files", "token": self._token, "root": status["folder"]},
            }
        return found, services.get("weights")

    def _put(self, addresses: dict[str, Any], weights: dict[str, str] | None) -> None:
        empty: dict[str, Any] = {"trainer": None} if "trainer" in self._roles else {}
        if not addresses and self.addresses:
            addresses = {**self.addresses, **empty}
        if addresses != self.addresses or (weights or self.weights) != self.weights:
            self.addresses, self.weights, self._changed = addresses, weights or self.weights, True
            self._wake()
        if addresses and all(addresses.get(name) for name in empty):
            self._ready.set()

    def _fail(self, error: NightshiftError) -> None:
        self.error = error
        self._ready.set()
        self._wake()


def _called(entry: dict[str, Any] | None, status: dict[str, Any]) -> dict[str, Any] | None:
    """A scorer's entry, with the run's token where it is on the agent's host; others never learn it."""
    if entry is None or urlsplit(entry["url"]).hostname != status["host"].lower():
        return entry
    return {**entry, "token": status["token"]}
