from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("transfer_id", "epoch", "sender_id", "source_rank", "target_rank", "first_head", "num_heads", "wire", "proof")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    sender_id: str
    source_rank: int
    target_rank: int
    first_head: int
    num_heads: int
    wire: str
    proof: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sender_id: _Optional[str] = ..., source_rank: _Optional[int] = ..., target_rank: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., wire: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[FrameHeader]
    def __init__(self, frames: _Optional[_Iterable[_Union[FrameHeader, _Mapping]]] = ...) -> None: ...

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
