from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Context(_message.Message):
    __slots__ = ("run_id", "traceparent", "policy_version", "job_trace_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    traceparent: str
    policy_version: str
    job_trace_id: str
    def __init__(self, run_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., policy_version: _Optional[str] = ..., job_trace_id: _Optional[str] = ...) -> None: ...
