from nightshift.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeTrainerRequest(_message.Message):
    __slots__ = ("context",)
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ...) -> None: ...

class DescribeTrainerResponse(_message.Message):
    __slots__ = ("model", "dtype", "incarnation", "ranks", "parameters", "vocab_size", "policy_version", "optimizer_steps", "max_positions", "parallelisms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PARALLELISMS_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    incarnation: str
    ranks: int
    parameters: int
    vocab_size: int
    policy_version: str
    optimizer_steps: int
    max_positions: int
    parallelisms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., incarnation: _Optional[str] = ..., ranks: _Optional[int] = ..., parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., policy_version: _Optional[str] = ..., optimizer_steps: _Optional[int] = ..., max_positions: _Optional[int] = ..., parallelisms: _Optional[_Iterable[str]] = ...) -> None: ...

class LogProbsRequest(_message.Message):
    __slots__ = ("context", "samples")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    samples: bytes
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., samples: _Optional[bytes] = ...) -> None: ...

class LogProbsResponse(_message.Message):
    __slots__ = ("results", "seconds")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    results: bytes
    seconds: float
    def __init__(self, results: _Optional[bytes] = ..., seconds: _Optional[float] = ...) -> None: ...

class LossRequest(_message.Message):
    __slots__ = ("context", "samples", "loss")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    samples: bytes
    loss: bytes
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., samples: _Optional[bytes] = ..., loss: _Optional[bytes] = ...) -> None: ...

class LossResponse(_message.Message):
    __slots__ = ("metrics", "seconds")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    seconds: float
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., seconds: _Optional[float] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("context", "step", "attempt", "expect_version", "new_version", "part", "final", "samples", "loss", "learning_rate", "debug")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPECT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEW_VERSION_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    step: int
    attempt: int
    expect_version: str
    new_version: str
    part: int
    final: bool
    samples: bytes
    loss: bytes
    learning_rate: float
    debug: bool
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., expect_version: _Optional[str] = ..., new_version: _Optional[str] = ..., part: _Optional[int] = ..., final: bool = ..., samples: _Optional[bytes] = ..., loss: _Optional[bytes] = ..., learning_rate: _Optional[float] = ..., debug: bool = ...) -> None: ...

class UpdateResponse(_message.Message):
    __slots__ = ("applied", "repeated", "stepped", "metrics", "seconds", "peak_memory_bytes", "tensors")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    STEPPED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    applied: bool
    repeated: bool
    stepped: bool
    metrics: _containers.ScalarMap[str, float]
    seconds: float
    peak_memory_bytes: int
    tensors: bytes
    def __init__(self, applied: bool = ..., repeated: bool = ..., stepped: bool = ..., metrics: _Optional[_Mapping[str, float]] = ..., seconds: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., tensors: _Optional[bytes] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("context", "policy_version", "probe")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    policy_version: str
    probe: bytes
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., policy_version: _Optional[str] = ..., probe: _Optional[bytes] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("backend", "update_info", "digest", "bytes", "probe", "seconds", "changed_fraction")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    UPDATE_INFO_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    backend: str
    update_info: bytes
    digest: str
    bytes: int
    probe: bytes
    seconds: float
    changed_fraction: float
    def __init__(self, backend: _Optional[str] = ..., update_info: _Optional[bytes] = ..., digest: _Optional[str] = ..., bytes: _Optional[int] = ..., probe: _Optional[bytes] = ..., seconds: _Optional[float] = ..., changed_fraction: _Optional[float] = ...) -> None: ...

class OpenLinkRequest(_message.Message):
    __slots__ = ("context", "server", "world_size", "by_store")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BY_STORE_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    server: str
    world_size: int
    by_store: bool
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., server: _Optional[str] = ..., world_size: _Optional[int] = ..., by_store: bool = ...) -> None: ...

class OpenLinkResponse(_message.Message):
    __slots__ = ("init_info",)
    INIT_INFO_FIELD_NUMBER: _ClassVar[int]
    init_info: bytes
    def __init__(self, init_info: _Optional[bytes] = ...) -> None: ...

class JoinLinkRequest(_message.Message):
    __slots__ = ("context", "server", "timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    server: str
    timeout_s: float
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., server: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class JoinLinkResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class SendWeightsRequest(_message.Message):
    __slots__ = ("context", "server", "timeout_s")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    server: str
    timeout_s: float
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., server: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class SendWeightsResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("context", "state_dir", "export_dir", "manifest")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    EXPORT_DIR_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    state_dir: str
    export_dir: str
    manifest: str
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., state_dir: _Optional[str] = ..., export_dir: _Optional[str] = ..., manifest: _Optional[str] = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("seconds", "bytes")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    bytes: int
    def __init__(self, seconds: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("context", "state_dir", "policy_version")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    state_dir: str
    policy_version: str
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., state_dir: _Optional[str] = ..., policy_version: _Optional[str] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("manifest", "optimizer_steps")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEPS_FIELD_NUMBER: _ClassVar[int]
    manifest: str
    optimizer_steps: int
    def __init__(self, manifest: _Optional[str] = ..., optimizer_steps: _Optional[int] = ...) -> None: ...
