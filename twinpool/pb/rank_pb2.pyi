from twinpool.pb import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankMessage(_message.Message):
    __slots__ = ("hello", "ready", "failure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    ready: RankReady
    failure: RankFailure
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., ready: _Optional[_Union[RankReady, _Mapping]] = ..., failure: _Optional[_Union[RankFailure, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "num_ranks", "generation")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    num_ranks: int
    generation: int
    def __init__(self, rank: _Optional[int] = ..., num_ranks: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class RankWelcome(_message.Message):
    __slots__ = ("group_address",)
    GROUP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    group_address: str
    def __init__(self, group_address: _Optional[str] = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ("address", "endpoints")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    endpoints: _types_pb2.RankEndpoints
    def __init__(self, address: _Optional[str] = ..., endpoints: _Optional[_Union[_types_pb2.RankEndpoints, _Mapping]] = ...) -> None: ...

class RankFailure(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ExpectRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "sender_id", "key", "blocks", "num_tokens", "cached_tokens", "timeout_s")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    sender_id: str
    key: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    cached_tokens: int
    timeout_s: float
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sender_id: _Optional[str] = ..., key: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class TransferName(_message.Message):
    __slots__ = ("transfer_id", "epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("ticket", "timeout_s")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ticket: _types_pb2.KVTicket
    timeout_s: float
    def __init__(self, ticket: _Optional[_Union[_types_pb2.KVTicket, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class RankDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankState(_message.Message):
    __slots__ = ("num_transfers", "asked_to_stop", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ASKED_TO_STOP_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    num_transfers: int
    asked_to_stop: bool
    counters: _containers.ScalarMap[str, int]
    def __init__(self, num_transfers: _Optional[int] = ..., asked_to_stop: bool = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
