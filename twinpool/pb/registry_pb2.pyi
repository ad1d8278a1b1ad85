from twinpool.pb import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinMessage(_message.Message):
    __slots__ = ("info", "load")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    info: _types_pb2.WorkerInfo
    load: _types_pb2.WorkerLoad
    def __init__(self, info: _Optional[_Union[_types_pb2.WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("heartbeat_s",)
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ...) -> None: ...
