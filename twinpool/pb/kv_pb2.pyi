from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushHeader(_message.Message):
    __slots__ = ("transfer_id", "epoch", "frames")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    frames: _containers.RepeatedCompositeFieldContainer[FrameHeader]
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., frames: _Optional[_Iterable[_Union[FrameHeader, _Mapping]]] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("layer", "first_token", "num_tokens", "checksum", "payload_bytes")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    first_token: int
    num_tokens: int
    checksum: int
    payload_bytes: int
    def __init__(self, layer: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., checksum: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("credit_bytes", "complete", "error", "detail")
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    credit_bytes: int
    complete: bool
    error: str
    detail: str
    def __init__(self, credit_bytes: _Optional[int] = ..., complete: bool = ..., error: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
