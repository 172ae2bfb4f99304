from nightshift.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("context", "samples", "linked", "weights")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    samples: bytes
    linked: _containers.RepeatedScalarFieldContainer[str]
    weights: bytes
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., samples: _Optional[bytes] = ..., linked: _Optional[_Iterable[str]] = ..., weights: _Optional[bytes] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("results", "seconds", "peak_memory_bytes")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    results: bytes
    seconds: float
    peak_memory_bytes: int
    def __init__(self, results: _Optional[bytes] = ..., seconds: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("role", "model", "dtype", "incarnation", "vocab_size")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    role: str
    model: str
    dtype: str
    incarnation: str
    vocab_size: int
    def __init__(self, role: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., incarnation: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...
