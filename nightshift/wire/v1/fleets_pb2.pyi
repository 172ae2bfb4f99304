from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListFleetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListFleetsResponse(_message.Message):
    __slots__ = ("fleets",)
    FLEETS_FIELD_NUMBER: _ClassVar[int]
    fleets: _containers.RepeatedCompositeFieldContainer[Fleet]
    def __init__(self, fleets: _Optional[_Iterable[_Union[Fleet, _Mapping]]] = ...) -> None: ...

class FleetRef(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Fleet(_message.Message):
    __slots__ = ("name", "hold_s", "switch_s", "drain_s", "deadline_s", "created", "servers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    SWITCH_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    hold_s: float
    switch_s: float
    drain_s: float
    deadline_s: float
    created: float
    servers: _containers.RepeatedCompositeFieldContainer[FleetServer]
    def __init__(self, name: _Optional[str] = ..., hold_s: _Optional[float] = ..., switch_s: _Optional[float] = ..., drain_s: _Optional[float] = ..., deadline_s: _Optional[float] = ..., created: _Optional[float] = ..., servers: _Optional[_Iterable[_Union[FleetServer, _Mapping]]] = ...) -> None: ...

class FleetServer(_message.Message):
    __slots__ = ("name", "url", "token_variable", "healthy", "lent", "job_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_VARIABLE_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    url: str
    token_variable: str
    healthy: bool
    lent: bool
    job_id: str
    def __init__(self, name: _Optional[str] = ..., url: _Optional[str] = ..., token_variable: _Optional[str] = ..., healthy: bool = ..., lent: bool = ..., job_id: _Optional[str] = ...) -> None: ...

class NewFleetServer(_message.Message):
    __slots__ = ("name", "url", "token_variable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_VARIABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    url: str
    token_variable: str
    def __init__(self, name: _Optional[str] = ..., url: _Optional[str] = ..., token_variable: _Optional[str] = ...) -> None: ...

class PutFleetRequest(_message.Message):
    __slots__ = ("name", "servers", "hold_s", "switch_s", "drain_s", "deadline_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    SWITCH_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    servers: _containers.RepeatedCompositeFieldContainer[NewFleetServer]
    hold_s: float
    switch_s: float
    drain_s: float
    deadline_s: float
    def __init__(self, name: _Optional[str] = ..., servers: _Optional[_Iterable[_Union[NewFleetServer, _Mapping]]] = ..., hold_s: _Optional[float] = ..., switch_s: _Optional[float] = ..., drain_s: _Optional[float] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class DeletedFleet(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeasesRequest(_message.Message):
    __slots__ = ("name", "before", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: int
    limit: int
    def __init__(self, name: _Optional[str] = ..., before: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("number", "server", "job_id", "since", "asked", "asked_why", "ended", "ended_why")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ASKED_WHY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ENDED_WHY_FIELD_NUMBER: _ClassVar[int]
    number: int
    server: str
    job_id: str
    since: float
    asked: float
    asked_why: str
    ended: float
    ended_why: str
    def __init__(self, number: _Optional[int] = ..., server: _Optional[str] = ..., job_id: _Optional[str] = ..., since: _Optional[float] = ..., asked: _Optional[float] = ..., asked_why: _Optional[str] = ..., ended: _Optional[float] = ..., ended_why: _Optional[str] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("job_id", "weight", "wants", "held", "owed", "used", "lag")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    OWED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    weight: float
    wants: bool
    held: int
    owed: float
    used: float
    lag: float
    def __init__(self, job_id: _Optional[str] = ..., weight: _Optional[float] = ..., wants: bool = ..., held: _Optional[int] = ..., owed: _Optional[float] = ..., used: _Optional[float] = ..., lag: _Optional[float] = ...) -> None: ...

class LeasesResponse(_message.Message):
    __slots__ = ("leases", "shares", "next")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    next: int
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., next: _Optional[int] = ...) -> None: ...
