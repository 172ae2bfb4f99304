from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobRef(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("job", "project", "priority")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    job: str
    project: str
    priority: int
    def __init__(self, job: _Optional[str] = ..., project: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("id", "project", "name", "state", "pausing", "priority", "submitter", "submitted", "started", "ended", "updated", "step", "steps", "error", "exit_code", "spec")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAUSING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SUBMITTER_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    UPDATED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    id: str
    project: str
    name: str
    state: str
    pausing: bool
    priority: int
    submitter: str
    submitted: float
    started: float
    ended: float
    updated: float
    step: int
    steps: int
    error: str
    exit_code: int
    spec: _struct_pb2.Struct
    def __init__(self, id: _Optional[str] = ..., project: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., pausing: bool = ..., priority: _Optional[int] = ..., submitter: _Optional[str] = ..., submitted: _Optional[float] = ..., started: _Optional[float] = ..., ended: _Optional[float] = ..., updated: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., error: _Optional[str] = ..., exit_code: _Optional[int] = ..., spec: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("states", "name", "project", "limit", "cursor")
    STATES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[str]
    name: str
    project: str
    limit: int
    cursor: str
    def __init__(self, states: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., project: _Optional[str] = ..., limit: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("jobs", "next")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class Deleted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Setting(_message.Message):
    __slots__ = ("key", "value", "live", "why")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: _struct_pb2.Value
    live: bool
    why: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., live: bool = ..., why: _Optional[str] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ("settings", "pending")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    pending: _struct_pb2.Struct
    def __init__(self, settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., pending: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ChangeSettingsRequest(_message.Message):
    __slots__ = ("id", "changes")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    id: str
    changes: _struct_pb2.Struct
    def __init__(self, id: _Optional[str] = ..., changes: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("id", "after", "kinds", "present_only")
    ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_ONLY_FIELD_NUMBER: _ClassVar[int]
    id: str
    after: int
    kinds: _containers.RepeatedScalarFieldContainer[str]
    present_only: bool
    def __init__(self, id: _Optional[str] = ..., after: _Optional[int] = ..., kinds: _Optional[_Iterable[str]] = ..., present_only: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "kind", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: str
    data: str
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[str] = ..., data: _Optional[str] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ("id", "names", "kind", "after", "before", "most")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    id: str
    names: _containers.RepeatedScalarFieldContainer[str]
    kind: str
    after: int
    before: int
    most: int
    def __init__(self, id: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., kind: _Optional[str] = ..., after: _Optional[int] = ..., before: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class MetricsPoint(_message.Message):
    __slots__ = ("step", "kind", "time", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    kind: str
    time: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., kind: _Optional[str] = ..., time: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class MetricsResponse(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[MetricsPoint]
    def __init__(self, points: _Optional[_Iterable[_Union[MetricsPoint, _Mapping]]] = ...) -> None: ...

class RolloutsRequest(_message.Message):
    __slots__ = ("id", "step", "sort", "offset", "limit", "min_reward", "max_reward", "group_id", "trace_id", "finish_reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MIN_REWARD_FIELD_NUMBER: _ClassVar[int]
    MAX_REWARD_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    step: int
    sort: str
    offset: int
    limit: int
    min_reward: float
    max_reward: float
    group_id: str
    trace_id: str
    finish_reason: str
    def __init__(self, id: _Optional[str] = ..., step: _Optional[int] = ..., sort: _Optional[str] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ..., min_reward: _Optional[float] = ..., max_reward: _Optional[float] = ..., group_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class RolloutsResponse(_message.Message):
    __slots__ = ("total", "rollouts")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    total: int
    rollouts: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    def __init__(self, total: _Optional[int] = ..., rollouts: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ...) -> None: ...

class Ledger(_message.Message):
    __slots__ = ("issued", "trained", "dropped_stale", "dropped_filtered", "failed", "cancelled", "in_flight", "balanced")
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STALE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FILTERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    issued: int
    trained: int
    dropped_stale: int
    dropped_filtered: int
    failed: int
    cancelled: int
    in_flight: int
    balanced: bool
    def __init__(self, issued: _Optional[int] = ..., trained: _Optional[int] = ..., dropped_stale: _Optional[int] = ..., dropped_filtered: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., in_flight: _Optional[int] = ..., balanced: bool = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("step", "policy_version", "time", "bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    policy_version: str
    time: float
    bytes: int
    def __init__(self, step: _Optional[int] = ..., policy_version: _Optional[str] = ..., time: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class CheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("id", "step")
    ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    id: str
    step: int
    def __init__(self, id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("id", "role", "lines")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: str
    lines: int
    def __init__(self, id: _Optional[str] = ..., role: _Optional[str] = ..., lines: _Optional[int] = ...) -> None: ...

class LogsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("trace_id", "job")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    job: str
    def __init__(self, trace_id: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("sha256", "project", "data")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    project: str
    data: bytes
    def __init__(self, sha256: _Optional[str] = ..., project: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Uploaded(_message.Message):
    __slots__ = ("sha256", "bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    bytes: int
    def __init__(self, sha256: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class ListUploadsRequest(_message.Message):
    __slots__ = ("project", "limit")
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    project: str
    limit: int
    def __init__(self, project: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class UploadInfo(_message.Message):
    __slots__ = ("sha256", "bytes", "time")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    bytes: int
    time: float
    def __init__(self, sha256: _Optional[str] = ..., bytes: _Optional[int] = ..., time: _Optional[float] = ...) -> None: ...

class ListUploadsResponse(_message.Message):
    __slots__ = ("uploads", "bytes", "most_bytes")
    UPLOADS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    uploads: _containers.RepeatedCompositeFieldContainer[UploadInfo]
    bytes: int
    most_bytes: int
    def __init__(self, uploads: _Optional[_Iterable[_Union[UploadInfo, _Mapping]]] = ..., bytes: _Optional[int] = ..., most_bytes: _Optional[int] = ...) -> None: ...

class UploadRef(_message.Message):
    __slots__ = ("sha256", "project")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PROJECT_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    project: str
    def __init__(self, sha256: _Optional[str] = ..., project: _Optional[str] = ...) -> None: ...
