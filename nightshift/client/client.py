"""``nightshift.Client``: jobs of a service, from Python."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from nightshift.client.files import pack, read_job
from nightshift.client.models import Checkpoint, Event, Job
from nightshift.client.problems import ServiceError, error_of
from nightshift.config import JobSpec
from nightshift.wire import codec
from nightshift.wire.errors import BadInputError

DEFAULT_URL = "http://127.0.0.1:8700"
#: Attempts of one request to a service that is away or busy.
_TRIES = 5
_PAUSE_S = 0.2
_MOST_PAUSE_S = 10.0


def data_dir() -> Path:
    """The folder of this user's own service."""
    return Path(os.environ.get("NIGHTSHIFT_DATA_DIR") or "~/.local/state/nightshift").expanduser()


class Client:
    """A client of a job service.

    Args:
        url: of the service; None: ``NIGHTSHIFT_URL``, else this machine's own.
        token: None: ``NIGHTSHIFT_TOKEN``, else, for a service on loopback, the one that it left for this user.
        timeout_s: deadline of one answer.
        tries: attempts of one request to a service that is away or busy.
        transport: in place of the network, for tests.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 60.0,
        tries: int = _TRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = (url or os.environ.get("NIGHTSHIFT_URL") or DEFAULT_URL).rstrip("/")
        self._tries = tries
        token = token or os.environ.get("NIGHTSHIFT_TOKEN") or self._local_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    # Jobs -------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        job: str | Path | dict[str, Any] | JobSpec,
        overrides: Sequence[str] = (),
        *,
        priority: int = 0,
        project: str | None = None,
        idempotency_key: str | None = None,
        session: bool = False,
    ) -> Job:
        """Queues a job; the files that it names on this machine travel with it.

        Args:
            job: a job file, or its content.
            overrides: ``key=value`` in place of the file's values.
            priority: -100 to 100; higher goes first.
            project: for tokens of all projects.
            session: the job is driven step by step, with :meth:`ask`; see :class:`nightshift.Trainer`.
            idempotency_key: submitting again with the same key gives the same job; by default one is made, so that a
                request that is repeated because its answer got lost makes no second job.

        Raises:
            BadInputError: the job is wrong.
            ServiceError: the service refuses it.
        """
        where = {"project": project} if project is not None else {}
        document = pack(read_job(job, overrides), lambda digest, path: self._upload(digest, path, where))
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        params = {"priority": priority, "session": session, **where}
        answer = self._ask("POST", "/v1/jobs", json=document, params=params, headers=headers)
        return Job.of(answer.json())

    def plan(self, job: str | Path | dict[str, Any] | JobSpec, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """What the service thinks that a job needs."""
        document = pack(read_job(job, overrides), lambda digest, path: self._upload(digest, path, {}))
        found: dict[str, Any] = self._ask("POST", "/v1/plan", json=document, timeout=150.0).json()
        return found

    def jobs(
        self, *, states: Iterable[str] = (), name: str | None = None, project: str | None = None, page: int = 100
    ) -> Iterator[Job]:
        """Jobs, the newest first; pages are fetched as they are needed."""
        params: dict[str, Any] = {"state": list(states), "limit": page}
        params |= {key: value for key, value in (("name", name), ("project", project)) if value is not None}
        while True:
            answer = self._ask("GET", "/v1/jobs", params=params).json()
            yield from (Job.of(item) for item in answer["jobs"])
            if answer["next"] is None:
                return
            params["cursor"] = answer["next"]

    def fleets(self) -> list[dict[str, Any]]:
        """Fleets of rollout servers, each with who has which server."""
        found: list[dict[str, Any]] = self._ask("GET", "/v1/fleets").json()["fleets"]
        return found

    def leases(self, fleet: str, *, before: int | None = None, limit: int = 100) -> dict[str, Any]:
        """Leases of a fleet, the newest first, and ``shares``: what the running jobs have of it, in server-seconds."""
        params = {"limit": limit, **({"before": before} if before is not None else {})}
        found: dict[str, Any] = self._ask("GET", f"/v1/fleets/{fleet}/leases", params=params).json()
        return found

    def put_fleet(self, name: str, servers: Sequence[dict[str, str]], **terms: float) -> dict[str, Any]:
        """Makes a fleet, or changes it; for administrators.

        Args:
            name: of the fleet.
            servers: each with ``name`` and ``url``.
            terms: ``hold_s``, ``switch_s``, ``drain_s`` and ``deadline_s``, in seconds.
        """
        found: dict[str, Any] = self._ask("PUT", f"/v1/fleets/{name}", json={"servers": list(servers), **terms}).json()
        return found

    def delete_fleet(self, name: str) -> None:
        """Removes a fleet of which nothing is lent; for administrators."""
        self._ask("DELETE", f"/v1/fleets/{name}")

    def get(self, job_id: str) -> Job:
        """One job, with its job file."""
        return Job.of(self._ask("GET", f"/v1/jobs/{job_id}").json())

    def find(self, prefix: str) -> Job:
        """The job with this id, or the only one whose id begins so.

        Raises:
            BadInputError: there is none, or there are several.
        """
        try:
            return self.get(prefix)
        except ServiceError as error:
            if error.status not in (404, 422):
                raise
        found = [job for job in self.jobs() if job.id.startswith(prefix)]
        if len(found) == 1:
            return found[0]
        names = ", ".join(job.id for job in found[:5])
        raise BadInputError(f"{prefix!r} fits several jobs: {names}" if found else f"there is no job {prefix!r}")

    def pause(self, job_id: str) -> Job:
        """Asks a job to leave a checkpoint and free what it holds."""
        return Job.of(self._ask("POST", f"/v1/jobs/{job_id}/pause").json())

    def resume(self, job_id: str) -> Job:
        """Queues a paused, cancelled or failed job again."""
        return Job.of(self._ask("POST", f"/v1/jobs/{job_id}/resume").json())

    def cancel(self, job_id: str) -> Job:
        """Ends a job."""
        return Job.of(self._ask("POST", f"/v1/jobs/{job_id}/cancel").json())

    def delete(self, job_id: str) -> None:
        """Removes a job that has ended, with everything that it wrote."""
        self._ask("DELETE", f"/v1/jobs/{job_id}")

    def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Waits until a job has ended or is paused.

        Raises:
            TimeoutError: it had not after ``timeout_s`` seconds.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in self._stream(job_id, "0", ("state",), until):
            pass
        job = self.get(job_id)
        if not job.has_ended and job.state != "paused":
            raise TimeoutError(f"job {job_id} is {job.state} after {timeout_s} s")
        return job

    def post(self, job_id: str, message: dict[str, Any]) -> int:
        """Asks a driven job for something; returns the number under which its answer is found."""
        headers = {"Content-Type": "application/x-msgpack"}
        answer = self._ask("POST", f"/v1/jobs/{job_id}/session", content=codec.pack(message), headers=headers)
        return int(answer.json()["number"])

    def answer(self, job_id: str, number: int, timeout_s: float) -> dict[str, Any]:
        """Waits for the answer to a request.

        Raises:
            ServiceError: the job has ended.
            TimeoutError: there was none after ``timeout_s`` seconds.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            params = {"wait_s": min(20.0, left)}
            found = self._ask("GET", f"/v1/jobs/{job_id}/session/{number}", params=params)
            if found.status_code == 200:
                value: dict[str, Any] = codec.unpack(found.content)
                return value
        raise TimeoutError(f"job {job_id} had not answered request {number} after {timeout_s:.0f} s")

    # Settings ---------------------------------------------------------------------------------------------------------

    def settings(self, job_id: str) -> dict[str, Any]:
        """Live settings: ``settings`` with value, whether they can change, and why; ``pending`` changes."""
        found: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/settings").json()
        return found

    def set(self, job_id: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Changes live settings: all of them or, where one is refused, none."""
        found: dict[str, Any] = self._ask("PATCH", f"/v1/jobs/{job_id}/settings", json=dict(changes)).json()
        return found

    # Results ----------------------------------------------------------------------------------------------------------

    def events(
        self, job_id: str, *, after: str = "0", kinds: Sequence[str] = (), follow: bool = True
    ) -> Iterator[Event]:
        """Events of a job until it has ended; a stream that breaks off is taken up where it was.

        Args:
            after: id of the event behind which to begin.
            kinds: only these; empty: all.
            follow: False: only what is there now.
        """
        return self._stream(job_id, after, kinds, None, follow=follow)

    def metrics(self, job_id: str, *, names: Sequence[str] = (), kind: str | None = None) -> list[dict[str, Any]]:
        """Metrics by step: step, kind, time, metrics."""
        params: dict[str, Any] = {"name": list(names), **({"kind": kind} if kind else {})}
        points: list[dict[str, Any]] = self._ask("GET", f"/v1/jobs/{job_id}/metrics-history", params=params).json()[
            "points"
        ]
        return points

    def rollouts(self, job_id: str, **query: Any) -> list[dict[str, Any]]:
        """Samples that were trained on; ``query``: step, sort, limit, offset, min_reward, ..., as in the API."""
        rows: list[dict[str, Any]] = self._ask("GET", f"/v1/jobs/{job_id}/rollouts", params=query).json()["rollouts"]
        return rows

    def ledger(self, job_id: str) -> dict[str, Any]:
        """What became of every prompt group."""
        found: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/ledger").json()
        return found

    def report(self, job_id: str) -> dict[str, Any]:
        """The report on a run."""
        found: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/report").json()
        return found

    def trace(self, trace_id: str, job_id: str | None = None) -> dict[str, Any]:
        """The timeline of one prompt group.

        Args:
            trace_id: or its beginning, of at least 8 digits.
            job_id: where to look; None: in the newest jobs.
        """
        params = {"job": job_id} if job_id is not None else {}
        found: dict[str, Any] = self._ask("GET", f"/v1/traces/{trace_id}", params=params).json()
        return found

    def log_files(self, job_id: str) -> dict[str, int]:
        """Bytes of each log that there is, by its role."""
        found = self._ask("GET", f"/v1/jobs/{job_id}/logs").json()["logs"]
        return {item["role"]: item["bytes"] for item in found}

    def logs(self, job_id: str, role: str | None = None, lines: int = 200) -> str:
        """The end of a role's log; without a role, which logs there are."""
        if role is None:
            return "".join(f"{log:<24} {size:>12} bytes\n" for log, size in self.log_files(job_id).items())
        return self._ask("GET", f"/v1/jobs/{job_id}/logs/{role}", params={"lines": lines}).text

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Checkpoints in HF format, the oldest first."""
        found = self._ask("GET", f"/v1/jobs/{job_id}/checkpoints").json()["checkpoints"]
        return [Checkpoint.of(item) for item in found]

    def export(self, job_id: str, folder: str | Path, step: int | None = None) -> Path:
        """Fetches an HF checkpoint, by default the newest, into a folder that appears by rename.

        Raises:
            BadInputError: there is no such checkpoint, or the folder holds something already.
        """
        target = Path(folder).expanduser().resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise BadInputError(f"{str(target)!r} exists and is not an empty folder")
        steps = [checkpoint.step for checkpoint in self.checkpoints(job_id)]
        if not steps or (step is not None and step not in steps):
            listed = ", ".join(map(str, steps)) or "none"
            raise BadInputError(f"the job has no HF checkpoint{'' if step is None else f' of step {step}'}: {listed}")
        chosen = steps[-1] if step is None else step
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            part.mkdir(parents=True)
            with self._http.stream("GET", f"/v1/jobs/{job_id}/checkpoints/{chosen}/archive") as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise error_of(answer)
                with tarfile.open(fileobj=_Reader(answer.iter_bytes()), mode="r|") as archive:
                    archive.extractall(part, filter="data")
            (inner,) = part.iterdir()
            if target.exists():
                target.rmdir()
            inner.rename(target)
        except (httpx.HTTPError, tarfile.TarError) as error:
            raise ServiceError(f"the download broke off: {error}", fix="Try again") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return target

    def make_token(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a token: name, scopes, project and ttl_s; its text is in ``token``."""
        found: dict[str, Any] = self._ask("POST", "/v1/tokens", json=dict(body)).json()
        return found

    # The wire ---------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, **values: Any) -> httpx.Response:
        safe = method in ("GET", "PUT", "DELETE") or "Idempotency-Key" in (values.get("headers") or {})
        pause = _PAUSE_S
        for attempt in range(1, self._tries + 1):
            wait = pause
            try:
                answer = self._http.request(method, path, **values)
                if answer.status_code < 400:
                    return answer
                error = error_of(answer)
                if answer.status_code not in (429, 503) or "quota" in str(error.problem.get("type")):
                    raise error
                told = answer.headers.get("retry-after", "")
                wait = max(pause, float(told)) if told.isascii() and told.isdigit() else pause
            except httpx.TransportError as cause:
                error = ServiceError(
                    f"the service at {self.url} cannot be reached: {cause or type(cause).__name__}",
                    fix="Start it with `nightshift up`, or say where it is with --url or NIGHTSHIFT_URL",
                )
                if not safe and not isinstance(cause, httpx.ConnectError):
                    raise error from cause
            if attempt == self._tries:
                raise error
            time.sleep(min(wait, _MOST_PAUSE_S))
            pause = min(2 * pause, _MOST_PAUSE_S)
        raise AssertionError("unreachable")

    def _upload(self, digest: str, path: Path, params: dict[str, str]) -> None:
        try:
            self._ask("GET", f"/v1/uploads/{digest}", params=params)
        except ServiceError as error:
            if error.status != 404:
                raise
            self._ask("PUT", f"/v1/uploads/{digest}", params=params, content=path.read_bytes(), timeout=600.0)

    def _stream(
        self, job_id: str, after: str, kinds: Sequence[str], until: float | None, *, follow: bool = True
    ) -> Iterator[Event]:
        failures = 0
        while until is None or time.monotonic() < until:
            try:
                params: dict[str, Any] = {"kind": [*kinds, "end"] if kinds else [], "follow": follow}
                headers = {"Last-Event-ID": after, "Accept": "text/event-stream"}
                timeout = httpx.Timeout(60.0, read=60.0)
                with self._http.stream(
                    "GET", f"/v1/jobs/{job_id}/events", params=params, headers=headers, timeout=timeout
                ) as answer:
                    if answer.status_code in (429, 503):  # as with any request: busy, or its database is away
                        answer.read()
                        raise _BusyError(error_of(answer))
                    if answer.status_code >= 400:
                        answer.read()
                        raise error_of(answer)
                    for event in _events(answer.iter_lines(), until):
                        failures, after = 0, event.id or after
                        if event.kind == "end":
                            return
                        yield event
                # Ended without `end`: the service stops, or the token is good no more, which the next answer says.
                failures += 1
                cause: Exception = ServiceError("it ended without its last event")
            except httpx.TransportError as error:
                failures, cause = failures + 1, error
            except _BusyError as error:
                failures, cause = failures + 1, error.told
            if failures > self._tries:
                raise ServiceError(f"the event stream of {job_id} broke off: {cause}") from cause
            time.sleep(min(_PAUSE_S * 2**failures, _MOST_PAUSE_S))

    def _local_token(self) -> str | None:
        host = httpx.URL(self.url).host
        if host not in ("127.0.0.1", "localhost", "::1"):
            return None
        try:
            return (data_dir() / "admin-token").read_text().strip() or None
        except OSError:
            return None


class _BusyError(Exception):
    def __init__(self, told: ServiceError) -> None:
        super().__init__(str(told))
        self.told = told


def _events(lines: Iterable[str], until: float | None) -> Iterator[Event]:
    """Server-sent events of a stream's lines (HTML Living Standard, section 9.2); pings are comments."""
    event_id, kind, data = "", "", ""
    for line in lines:
        if until is not None and time.monotonic() >= until:
            return
        if not line:
            if data:
                value = json.loads(data)
                yield Event(event_id, kind, value if isinstance(value, dict) else {"value": value})
            kind, data = "", ""
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                event_id = value
            case "event":
                kind = value
            case "data":
                data = f"{data}\n{value}" if data else value


class _Reader(io.RawIOBase):
    """Pieces of bytes as a file that is read in order."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes: at most ``size``, all for -1, none at the end."""
        while not self._rest or size < 0:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._rest += chunk
        end = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:end], self._rest[end:]
        return data
