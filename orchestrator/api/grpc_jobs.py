"""gRPC's ``JobService``: the same calls as REST, carried out by the same functions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format, struct_pb2

from nightshift.cli.runs import EVENTS
from nightshift.wire.v1 import jobs_pb2, jobs_pb2_grpc
from orchestrator.api import readers, routes_data, routes_jobs, routes_settings
from orchestrator.api.problems import ProblemError, answer
from orchestrator.api.rate import RateLimit
from orchestrator.api.routes_events import finished
from orchestrator.api.service import Caller, Service, caller_from, check_scope, visible
from orchestrator.api.stream import boundary, events
from orchestrator.jobs.document import read_document
from orchestrator.jobs.states import Call, JobState
from orchestrator.store.access import Scope

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_PAGE = 50
Context = Any  # grpc carries no types


def _call(scope: Scope) -> Callable[[Any], Any]:
    """Makes a call of a method ``(self, caller, request)`` that runs in a thread."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        async def wrapper(self: JobServicer, request: Any, context: Context) -> Any:
            async with _Refusals(context, method.__name__):
                caller = await self.caller(context, scope)
                return await asyncio.to_thread(method, self, caller, request)

        return wrapper

    return decorate


class _Refusals:
    """Ends a call with the problem of what is raised within."""

    def __init__(self, context: Context, method: str) -> None:
        self._context = context
        self._path = f"/nightshift.wire.v1.JobService/{method}"

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            problem = answer(self._path, error)
            code = _CODES.get(problem.status_code, grpc.StatusCode.INTERNAL)
            body = bytes(problem.body)
            detail = json_format.Parse(body, struct_pb2.Struct())["detail"]
            await self._context.abort(code, str(detail), (("problem-bin", body),))


class JobServicer(jobs_pb2_grpc.JobServiceServicer):
    """Answers gRPC calls for a service."""

    def __init__(self, service: Service, rate: RateLimit) -> None:
        self._service = service
        self._rate = rate

    async def caller(self, context: Context, scope: Scope) -> Caller:
        """Who is calling.

        Raises:
            ProblemError: the token is missing or wrong, lacks the scope, or asks too often.
        """
        authorization = _metadata(context, "authorization")
        if self._rate.take(authorization or context.peer().rpartition(":")[0]):
            raise ProblemError(429, "too many requests")
        kind, _, text = authorization.partition(" ")
        token = text if kind.lower() == "bearer" and text else None
        return check_scope(await asyncio.to_thread(caller_from, self._service, token), scope)

    # Jobs -------------------------------------------------------------------------------------------------------------

    async def Submit(self, request: Any, context: Context) -> Any:
        """Queues a job."""
        async with _Refusals(context, "Submit"):
            caller = await self.caller(context, Scope.SUBMIT)
            document = self._document(request.job)
            if not -100 <= request.priority <= 100:
                raise ProblemError(422, "priority must be between -100 and 100", errors=[("priority", "-100 to 100")])
            key = _metadata(context, "idempotency-key") or None
            record, _ = await asyncio.to_thread(
                routes_jobs.submit_document,
                self._service,
                caller,
                document,
                request.project or None,
                request.priority,
                key[:255] if key else None,
                _metadata(context, "traceparent"),
            )
            self._service.scheduler.wake()
            return _job(routes_jobs.detail(record))

    async def Plan(self, request: Any, context: Context) -> Any:
        """Checks a job, and estimates what it needs."""
        async with _Refusals(context, "Plan"):
            caller = await self.caller(context, Scope.SUBMIT)
            return _struct(await routes_jobs.make_plan(self._service, caller, self._document(request.job)))

    @_call(Scope.READ)
    def List(self, caller: Caller, request: Any) -> Any:
        """Jobs, the newest first."""
        states = [_state(name) for name in request.states]
        if request.cursor and not request.cursor.isdigit():
            raise ProblemError(422, "cursor must be what `next` of the page before says", errors=[("cursor", "digits")])
        page = routes_jobs.list_jobs(
            self._service,
            caller,
            state=states,
            name=request.name or None,
            project=request.project or None,
            limit=_limit(request.limit),
            cursor=request.cursor[:18] or None,
        )
        return jobs_pb2.ListResponse(jobs=[_job(job) for job in page.jobs], next=page.next or "")

    @_call(Scope.READ)
    def Get(self, caller: Caller, request: Any) -> Any:
        """One job with its job file."""
        return _job(routes_jobs.get_job(self._service, caller, request.id))

    @_call(Scope.SUBMIT)
    def Pause(self, caller: Caller, request: Any) -> Any:
        """Asks a job to leave a checkpoint and free what it holds."""
        return _job(routes_jobs.steer(self._service, caller, request.id, Call.PAUSE))

    @_call(Scope.SUBMIT)
    def Resume(self, caller: Caller, request: Any) -> Any:
        """Queues a job again."""
        return _job(routes_jobs.steer(self._service, caller, request.id, Call.RESUME))

    @_call(Scope.SUBMIT)
    def Cancel(self, caller: Caller, request: Any) -> Any:
        """Ends a job."""
        return _job(routes_jobs.steer(self._service, caller, request.id, Call.CANCEL))

    @_call(Scope.SUBMIT)
    def Delete(self, caller: Caller, request: Any) -> Any:
        """Removes a job that has ended."""
        routes_jobs.delete_job(self._service, caller, request.id)
        return jobs_pb2.Deleted()

    @_call(Scope.READ)
    def GetSettings(self, caller: Caller, request: Any) -> Any:
        """Live settings."""
        return _settings(routes_settings.settings(self._service, caller, request.id))

    @_call(Scope.SUBMIT)
    def ChangeSettings(self, caller: Caller, request: Any) -> Any:
        """Changes live settings: all or none."""
        changes = {key: _whole(value) for key, value in json_format.MessageToDict(request.changes).items()}
        if not changes:
            raise ProblemError(422, "no setting is named", errors=[("changes", "must not be empty")])
        return _settings(routes_settings.change_settings(self._service, caller, request.id, changes))

    # Results ----------------------------------------------------------------------------------------------------------

    async def Events(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Events as they happen."""
        service = self._service
        async with _Refusals(context, "Events"):
            caller = await self.caller(context, Scope.READ)
            record = await asyncio.to_thread(visible, service, caller, request.id)
            if service.streams >= service.config.max_streams:
                raise ProblemError(429, "too many event streams are open")
            path = Path(record.run_dir) / EVENTS
            offset = await asyncio.to_thread(boundary, path, request.after)
            ended = functools.partial(finished, service, record.id)
            kinds = frozenset(request.kinds)
            service.streams += 1
            try:
                async for event in events(path, offset, kinds, ended, follow=not request.present_only):
                    if event.event != "end":
                        yield jobs_pb2.Event(id=int(event.id or 0), kind=event.event, data=event.data)
            finally:
                service.streams -= 1

    @_call(Scope.READ)
    def Metrics(self, caller: Caller, request: Any) -> Any:
        """Metrics by step."""
        if request.kind not in ("", "train", "evaluation"):
            raise ProblemError(422, "kind must be train or evaluation", errors=[("kind", "train or evaluation")])
        history = routes_data.metrics_history(
            self._service,
            caller,
            request.id,
            kind=request.kind or None,
            name=list(request.names),
            after=None,
            before=None,
            most=100_000,
        )
        return jobs_pb2.MetricsResponse(
            points=[
                jobs_pb2.MetricsPoint(
                    step=point.step,
                    kind=point.kind,
                    time=point.time,
                    metrics={name: value for name, value in point.metrics.items() if value is not None},
                )
                for point in history.points
            ]
        )

    @_call(Scope.READ)
    def Rollouts(self, caller: Caller, request: Any) -> Any:
        """What was generated and trained on."""
        sorts = ("step", "reward", "response_tokens", "prompt_tokens")
        sort = request.sort or "-step"
        if sort.removeprefix("-") not in sorts:
            raise ProblemError(422, f"sort must be one of {', '.join(sorts)}", errors=[("sort", "no such column")])
        query = readers.RolloutQuery(
            step=request.step if request.HasField("step") else None,
            min_reward=request.min_reward if request.HasField("min_reward") else None,
            max_reward=request.max_reward if request.HasField("max_reward") else None,
            sort=sort,
            offset=max(0, request.offset),
            limit=_limit(request.limit),
        )
        page = routes_data.find_rollouts(self._service, caller, request.id, query)
        return jobs_pb2.RolloutsResponse(
            total=page.total, rollouts=[_struct(row.model_dump()) for row in page.rollouts]
        )

    @_call(Scope.READ)
    def GetLedger(self, caller: Caller, request: Any) -> Any:
        """What became of every prompt group."""
        return jobs_pb2.Ledger(**routes_data.ledger(self._service, caller, request.id).model_dump())

    @_call(Scope.READ)
    def Checkpoints(self, caller: Caller, request: Any) -> Any:
        """Checkpoints in HF format."""
        found = routes_data.checkpoints(self._service, caller, request.id).checkpoints
        return jobs_pb2.CheckpointsResponse(
            checkpoints=[
                jobs_pb2.Checkpoint(
                    step=item.step, policy_version=item.policy_version or "", time=item.time, bytes=item.bytes
                )
                for item in found
            ]
        )

    async def Download(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """A checkpoint as a tar stream."""
        async with _Refusals(context, "Download"):
            caller = await self.caller(context, Scope.READ)
            find = functools.partial(routes_data.one_checkpoint, self._service, caller, request.id, request.step)
            view = await asyncio.to_thread(find)
            archive = await asyncio.to_thread(readers.Archive, view.folder, view.folder.name)
            chunks = archive.chunks()
            try:
                while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                    yield jobs_pb2.Chunk(data=chunk)
            finally:
                archive.close()

    @_call(Scope.READ)
    def Logs(self, caller: Caller, request: Any) -> Any:
        """The end of a log, or which there are."""
        found = routes_data.logs_of(self._service, caller, request.id)
        if not request.role:
            return jobs_pb2.LogsResponse(text="".join(f"{role}\n" for role in found))
        if request.role not in found:
            raise ProblemError(404, f"job {request.id} has no log of {request.role!r}")
        lines = min(max(1, request.lines or 200), 100_000)
        return jobs_pb2.LogsResponse(text=readers.log_tail(found[request.role], lines, most=1 << 20))

    @_call(Scope.READ)
    def Report(self, caller: Caller, request: Any) -> Any:
        """The report on a run."""
        return _struct(routes_data.report(self._service, caller, request.id))

    @_call(Scope.READ)
    def Trace(self, caller: Caller, request: Any) -> Any:
        """The timeline of one prompt group."""
        return _struct(routes_data.trace(self._service, caller, request.trace_id, job=None).model_dump())

    async def Upload(self, request_iterator: AsyncIterator[Any], context: Context) -> Any:
        """Keeps a file under the SHA-256 of its content."""
        async with _Refusals(context, "Upload"):
            caller = await self.caller(context, Scope.SUBMIT)
            receiving, size, digest = None, 0, ""
            try:
                async for chunk in request_iterator:
                    if receiving is None:
                        digest, project = chunk.sha256, caller.project_for(chunk.project or None)
                        if await asyncio.to_thread(self._service.access.project, project) is None:
                            raise ProblemError(404, f"there is no project {project!r}")
                        receiving = await asyncio.to_thread(self._service.uploads.receive, project, digest)
                    size += len(chunk.data)
                    await asyncio.to_thread(receiving.write, chunk.data)
                if receiving is None:
                    raise ProblemError(422, "the upload has no chunk", errors=[("sha256", "is missing")])
                await asyncio.to_thread(receiving.finish)
            except BaseException:
                if receiving is not None:
                    receiving.abort()
                raise
            await asyncio.to_thread(self._service.access.note, caller.name, "upload", digest, bytes=size)
            return jobs_pb2.Uploaded(sha256=digest, bytes=size)

    def _document(self, text: str) -> dict[str, Any]:
        if len(text.encode()) > self._service.config.max_body:
            raise ProblemError(413, f"the job is larger than {self._service.config.max_body} bytes")
        return read_document(text.encode(), is_json=False)


def make_server(service: Service, rate: RateLimit) -> grpc.aio.Server:
    """A server that answers for the service; give it a port, and start it."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 5 << 20)])
    jobs_pb2_grpc.add_JobServiceServicer_to_server(JobServicer(service, rate), server)
    return server


def _metadata(context: Context, name: str) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _state(name: str) -> JobState:
    try:
        return JobState(name)
    except ValueError:
        raise ProblemError(422, f"there is no state {name!r}", errors=[("states", ", ".join(JobState))]) from None


def _limit(asked: int) -> int:
    if asked < 0 or asked > 500:
        raise ProblemError(422, "limit must be between 1 and 500, or 0 for 50", errors=[("limit", "0 to 500")])
    return asked or _PAGE


def _whole(value: Any) -> Any:
    """JSON numbers of protobuf are floats; whole ones are meant as whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _struct(values: dict[str, Any]) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(values)
    return made


def _job(job: Any) -> Any:
    values = job.model_dump(exclude_none=True)
    spec = values.pop("spec", None)
    values["state"] = str(job.state)
    return jobs_pb2.Job(**values, spec=_struct(spec) if spec is not None else None)


def _settings(found: Any) -> Any:
    def value(item: Any) -> struct_pb2.Value:
        return _struct({"value": item}).fields["value"]

    return jobs_pb2.Settings(
        settings=[
            jobs_pb2.Setting(key=item.key, value=value(item.value), live=item.live, why=item.why)
            for item in found.settings
        ],
        pending=_struct(found.pending),
    )
