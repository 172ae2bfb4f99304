"""gRPC's ``JobService``: the same calls as REST, carried out by the same functions."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format, struct_pb2

from nightshift.cli.runs import EVENTS
from nightshift.wire.v1 import jobs_pb2, jobs_pb2_grpc
from orchestrator.api import readers, routes_data, routes_events, routes_jobs, routes_settings
from orchestrator.api.grpc_calls import Context, Servicer, call, check_texts, limit_of, metadata, struct
from orchestrator.api.problems import ProblemError
from orchestrator.api.routes_events import finished, keep_upload
from orchestrator.api.service import Caller, still_may, visible
from orchestrator.api.stream import NoLongerError, boundary, events
from orchestrator.jobs.document import read_document
from orchestrator.jobs.states import Call, JobState
from orchestrator.store.access import Scope

_PAGE = 50


class JobServicer(Servicer, jobs_pb2_grpc.JobServiceServicer):
    """Answers gRPC calls for a service."""

    service_name = "JobService"

    # Jobs -------------------------------------------------------------------------------------------------------------

    async def Submit(self, request: Any, context: Context) -> Any:
        """Queues a job."""
        async with self.refusals(context, "Submit"):
            check_texts(request)
            caller = await self.caller(context, Scope.SUBMIT)
            document = await self._document(request.job)
            if not -100 <= request.priority <= 100:
                raise ProblemError(422, "priority must be between -100 and 100", errors=[("priority", "-100 to 100")])
            key = metadata(context, "idempotency-key") or None
            if key is not None and not re.fullmatch(r"[ -~]{1,255}", key):
                text = "idempotency-key must be 1 to 255 printable characters of ASCII"
                raise ProblemError(422, text, errors=[("idempotency-key", "1 to 255 characters")])
            record, _ = await asyncio.to_thread(
                routes_jobs.submit_document,
                self._service,
                caller,
                document,
                request.project or None,
                request.priority,
                key,
                metadata(context, "traceparent"),
            )
            self._service.scheduler.wake()
            return _job(routes_jobs.detail(record))

    async def Plan(self, request: Any, context: Context) -> Any:
        """Checks a job, and estimates what it needs."""
        async with self.refusals(context, "Plan"):
            check_texts(request)
            caller = await self.caller(context, Scope.SUBMIT)
            return struct(await routes_jobs.make_plan(self._service, caller, await self._document(request.job)))

    async def GetPlan(self, request: Any, context: Context) -> Any:
        """What a job was estimated to need."""
        async with self.refusals(context, "GetPlan"):
            check_texts(request)
            caller = await self.caller(context, Scope.READ)
            return struct(await routes_jobs.plan_of_job(self._service, caller, request.id))

    @call(Scope.READ)
    def List(self, caller: Caller, request: Any) -> Any:
        """Jobs, the newest first."""
        states = [_state(name) for name in request.states]
        if request.cursor and not re.fullmatch(r"[0-9]{1,18}", request.cursor):
            raise ProblemError(422, "cursor must be what `next` of the page before says", errors=[("cursor", "digits")])
        page = routes_jobs.list_jobs(
            self._service,
            caller,
            state=states,
            name=request.name or None,
            project=request.project or None,
            limit=limit_of(request.limit, otherwise=_PAGE, most=500),
            cursor=request.cursor or None,
        )
        return jobs_pb2.ListResponse(jobs=[_job(job) for job in page.jobs], next=page.next or "")

    @call(Scope.READ)
    def Get(self, caller: Caller, request: Any) -> Any:
        """One job with its job file."""
        return _job(routes_jobs.get_job(self._service, caller, request.id))

    @call(Scope.SUBMIT)
    def Pause(self, caller: Caller, request: Any) -> Any:
        """Asks a job to leave a checkpoint and free what it holds."""
        return _job(routes_jobs.steer(self._service, caller, request.id, Call.PAUSE))

    @call(Scope.SUBMIT)
    def Resume(self, caller: Caller, request: Any) -> Any:
        """Queues a job again."""
        return _job(routes_jobs.steer(self._service, caller, request.id, Call.RESUME))

    @call(Scope.SUBMIT)
    def Cancel(self, caller: Caller, request: Any) -> Any:
        """Ends a job."""
        return _job(routes_jobs.steer(self._service, caller, request.id, Call.CANCEL))

    @call(Scope.SUBMIT)
    def Delete(self, caller: Caller, request: Any) -> Any:
        """Removes a job that has ended."""
        routes_jobs.delete_job(self._service, caller, request.id)
        return jobs_pb2.Deleted()

    @call(Scope.READ)
    def GetSettings(self, caller: Caller, request: Any) -> Any:
        """Live settings."""
        return _settings(routes_settings.settings(self._service, caller, request.id))

    @call(Scope.SUBMIT)
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
        async with self.refusals(context, "Events"):
            check_texts(request)
            caller = await self.caller(context, Scope.READ)
            record = await asyncio.to_thread(visible, service, caller, request.id)
            if service.streams >= service.config.max_streams:
                raise ProblemError(429, "too many event streams are open")
            path = Path(record.run_dir) / EVENTS
            offset = await asyncio.to_thread(boundary, path, request.after)
            ended = functools.partial(finished, service, record.id)
            may = functools.partial(still_may, service, caller)
            kinds = frozenset(request.kinds)
            service.streams += 1
            try:
                follow = not request.present_only
                async for event in events(path, offset, kinds, ended, follow=follow, may=may):
                    if event.event != "end":
                        yield jobs_pb2.Event(id=int(event.id or 0), kind=event.event, data=event.data)
            except NoLongerError:
                raise ProblemError(401, "the token has expired, or was revoked") from None
            finally:
                service.streams -= 1

    @call(Scope.READ)
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
            after=request.after if request.HasField("after") else None,
            before=request.before if request.HasField("before") else None,
            most=limit_of(request.most, otherwise=100_000, most=100_000),
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

    @call(Scope.READ)
    def Rollouts(self, caller: Caller, request: Any) -> Any:
        """What was generated and trained on."""
        sorts = ("step", "reward", "response_tokens", "prompt_tokens")
        sort = request.sort or "-step"
        if sort.removeprefix("-") not in sorts:
            raise ProblemError(422, f"sort must be one of {', '.join(sorts)}", errors=[("sort", "no such column")])
        filters = ("step", "min_reward", "max_reward", "group_id", "trace_id", "finish_reason")
        query = readers.RolloutQuery(
            **{name: getattr(request, name) for name in filters if request.HasField(name)},
            sort=sort,
            offset=max(0, request.offset),
            limit=limit_of(request.limit, otherwise=_PAGE, most=500),
        )
        page = routes_data.find_rollouts(self._service, caller, request.id, query)
        return jobs_pb2.RolloutsResponse(total=page.total, rollouts=[struct(row.model_dump()) for row in page.rollouts])

    @call(Scope.READ)
    def GetLedger(self, caller: Caller, request: Any) -> Any:
        """What became of every prompt group."""
        return jobs_pb2.Ledger(**routes_data.ledger(self._service, caller, request.id).model_dump())

    @call(Scope.READ)
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
        async with self.refusals(context, "Download"):
            check_texts(request)
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

    @call(Scope.READ)
    def Logs(self, caller: Caller, request: Any) -> Any:
        """The end of a log, or which there are."""
        found = routes_data.logs_of(self._service, caller, request.id)
        if not request.role:
            return jobs_pb2.LogsResponse(text="".join(f"{role}\n" for role in found))
        if request.role not in found:
            raise ProblemError(404, f"job {request.id} has no log of {request.role!r}")
        lines = min(max(1, request.lines or 200), 100_000)
        return jobs_pb2.LogsResponse(text=readers.log_tail(found[request.role], lines, most=1 << 20))

    @call(Scope.READ)
    def Report(self, caller: Caller, request: Any) -> Any:
        """The report on a run."""
        return struct(routes_data.report(self._service, caller, request.id))

    @call(Scope.READ)
    def Trace(self, caller: Caller, request: Any) -> Any:
        """The timeline of one prompt group."""
        return struct(routes_data.trace(self._service, caller, request.trace_id, job=request.job or None).model_dump())

    async def Upload(self, request_iterator: AsyncIterator[Any], context: Context) -> Any:
        """Keeps a file under the SHA-256 of its content."""
        async with self.refusals(context, "Upload"):
            caller = await self.caller(context, Scope.SUBMIT)
            wait_s = self._service.config.body_wait_s
            first = await _next(request_iterator, wait_s)
            if first is None:
                raise ProblemError(422, "the upload has no chunk", errors=[("sha256", "is missing")])
            check_texts(first)

            async def pieces() -> AsyncIterator[bytes]:
                chunk = first
                while chunk is not None:
                    yield chunk.data
                    chunk = await _next(request_iterator, wait_s)

            size, _ = await keep_upload(self._service, caller, first.project or None, first.sha256, pieces())
            return jobs_pb2.Uploaded(sha256=first.sha256, bytes=size)

    @call(Scope.READ)
    def ListUploads(self, caller: Caller, request: Any) -> Any:
        """Files of a project, the newest first."""
        limit = limit_of(request.limit, otherwise=1000, most=10_000)
        found = routes_events.list_uploads(self._service, caller, project=request.project or None, limit=limit)
        return jobs_pb2.ListUploadsResponse(
            uploads=[jobs_pb2.UploadInfo(**one.model_dump()) for one in found.uploads],
            bytes=found.bytes,
            most_bytes=found.most_bytes,
        )

    @call(Scope.SUBMIT)
    def DeleteUpload(self, caller: Caller, request: Any) -> Any:
        """Removes a file; jobs that were submitted with it keep theirs."""
        routes_events.delete_upload(self._service, caller, request.sha256, project=request.project or None)
        return jobs_pb2.Deleted()

    async def _document(self, text: str) -> dict[str, Any]:
        data = text.encode()
        if len(data) > self._service.config.max_body:
            raise ProblemError(413, f"the job is larger than {self._service.config.max_body} bytes")
        return await asyncio.to_thread(read_document, data, is_json=False)


async def _next(chunks: AsyncIterator[Any], wait_s: float) -> Any:
    """The next chunk; None: there is none any more.

    Raises:
        ProblemError: none came for so many seconds.
    """
    try:
        async with asyncio.timeout(wait_s):
            return await anext(chunks, None)
    except TimeoutError:
        raise ProblemError(408, f"no more of the upload came for {wait_s:.0f} s") from None


def _state(name: str) -> JobState:
    try:
        return JobState(name)
    except ValueError:
        raise ProblemError(422, f"there is no state {name!r}", errors=[("states", ", ".join(JobState))]) from None


def _whole(value: Any) -> Any:
    """JSON numbers of protobuf are floats; whole ones are meant as whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _job(job: Any) -> Any:
    values = job.model_dump(exclude_none=True)
    spec = values.pop("spec", None)
    values["state"] = str(job.state)
    return jobs_pb2.Job(**values, spec=struct(spec) if spec is not None else None)


def _settings(found: Any) -> Any:
    def value(item: Any) -> struct_pb2.Value:
        return struct({"value": item}).fields["value"]

    return jobs_pb2.Settings(
        settings=[
            jobs_pb2.Setting(key=item.key, value=value(item.value), live=item.live, why=item.why)
            for item in found.settings
        ],
        pending=struct(found.pending),
    )
