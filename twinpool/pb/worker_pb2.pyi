from twinpool.pb import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request", "ticket")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.Request
    ticket: _types_pb2.KVTicket
    def __init__(self, request: _Optional[_Union[_types_pb2.Request, _Mapping]] = ..., ticket: _Optional[_Union[_types_pb2.KVTicket, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request", "sender_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.Request
    sender_id: str
    def __init__(self, request: _Optional[_Union[_types_pb2.Request, _Mapping]] = ..., sender_id: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("ticket", "first")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.KVTicket
    first: _types_pb2.TokenOutput
    def __init__(self, ticket: _Optional[_Union[_types_pb2.KVTicket, _Mapping]] = ..., first: _Optional[_Union[_types_pb2.TokenOutput, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("empty",)
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    empty: bool
    def __init__(self, empty: bool = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditReply(_message.Message):
    __slots__ = ("worker_id", "role", "blocks", "tickets", "transfers", "sequences")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    blocks: _types_pb2.BlockCounts
    tickets: int
    transfers: int
    sequences: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., blocks: _Optional[_Union[_types_pb2.BlockCounts, _Mapping]] = ..., tickets: _Optional[int] = ..., transfers: _Optional[int] = ..., sequences: _Optional[int] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCacheReply(_message.Message):
    __slots__ = ("freed_blocks",)
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    def __init__(self, freed_blocks: _Optional[int] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class AssignReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
