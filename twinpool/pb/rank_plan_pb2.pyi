from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankPlan(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[RankItem]
    def __init__(self, items: _Optional[_Iterable[_Union[RankItem, _Mapping]]] = ...) -> None: ...

class RankItem(_message.Message):
    __slots__ = ("first_token", "token_ids", "blocks", "samples", "num_prompt_logits", "request_id")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGITS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    token_ids: bytes
    blocks: bytes
    samples: bool
    num_prompt_logits: int
    request_id: str
    def __init__(self, first_token: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., samples: bool = ..., num_prompt_logits: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...
