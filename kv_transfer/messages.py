"""The messages between the two ends of a channel as bytes, for transports that carry bytes.

Described in ``proto/kv.proto``.  Nothing that is read here is believed: lengths are compared with what came
before anything is cut, and the receiver checks the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError

from kv_transfer.frame import Frame
from kv_transfer.heap import fresh_bytes
from kv_transfer.hello import Hello
from kv_transfer.wire_errors import error_named
from twinpool.core.errors import TransferDamaged, TransferError
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVPayload
from twinpool.pb import kv_pb2

MAX_HELLO_BYTES = 4096
_MAX_HEADER_BYTES = 2**20
MAX_FRAMES = 8192  # in one message; a sender puts no more than one of each layer there
_LENGTH = struct.Struct("<I")


def hello_to_bytes(hello: Hello) -> bytes:
    """Return the message of ``hello``."""
    return kv_pb2.Hello(
        transfer_id=hello.transfer_id,
        epoch=hello.epoch,
        sender_id=hello.sender_id,
        source_rank=hello.source_rank,
        target_rank=hello.target_rank,
        first_head=hello.first_head,
        num_heads=hello.num_heads,
        wire=hello.wire,
        proof=hello.proof,
    ).SerializeToString()


def hello_from_bytes(data: bytes) -> Hello:
    """Return the hello of a message.

    Raises:
        TransferDamaged: It is none.
    """
    if len(data) > MAX_HELLO_BYTES:
        raise TransferDamaged(f"a first message of {len(data)} bytes names no transfer")
    try:
        message = kv_pb2.Hello.FromString(data)
    except DecodeError:
        raise TransferDamaged("the first message names no transfer") from None
    return Hello(
        transfer_id=message.transfer_id,
        epoch=message.epoch,
        sender_id=message.sender_id,
        source_rank=message.source_rank,
        target_rank=message.target_rank,
        first_head=message.first_head,
        num_heads=message.num_heads,
        wire=message.wire,
        proof=message.proof,
    )


def copied(frames: Sequence[Frame], target: memoryview) -> list[Frame]:
    """Return frames with their payloads copied to ``target``, one after the other."""
    copies = []
    start = 0
    for frame in frames:
        end = start + frame.payload.nbytes
        copies.append(frame.copied(target[start:end]))
        start = end
    return copies


def frame_headers(frames: Sequence[Frame]) -> bytes:
    """Return what a message says of its frames."""
    return kv_pb2.PushHeader(
        frames=[
            kv_pb2.FrameHeader(
                layer=frame.layer,
                first_token=frame.first_token,
                num_tokens=frame.num_tokens,
                checksum=frame.seal(),
                payload_bytes=frame.payload.nbytes,
            )
            for frame in frames
        ]
    ).SerializeToString()


def header_of(frames: Sequence[Frame]) -> bytes:
    """Return what goes before the payloads of one message: the header and its length."""
    header = frame_headers(frames)
    return _LENGTH.pack(len(header)) + header


def pack(frames: Sequence[Frame]) -> bytes:
    """Return one message; copies each payload once, and seals frames where they have been copied to."""
    guessed = [frame if frame.checksum is not None else replace(frame, checksum=1) for frame in frames]
    start = len(header_of(guessed))
    message, memory = fresh_bytes(start + sum(frame.payload.nbytes for frame in frames))
    header = header_of(copied(frames, memory[start:]))
    if len(header) != start:  # one of the checksums is 0, which takes no room
        return header + memory[start:]
    memory[:start] = header
    return message


def unpack(message: memoryview, hello: Hello) -> list[Frame]:
    """Cut a message into frames that point into it.

    Raises:
        TransferDamaged: Its lengths contradict each other, or the header is none.
    """
    if len(message) < _LENGTH.size:
        raise TransferDamaged(f"a message of {len(message)} bytes has no header")
    start = _LENGTH.size + _LENGTH.unpack_from(message)[0]
    if start > len(message):
        raise TransferDamaged(f"a message of {len(message)} bytes ends before its header, at {start}")
    return frames_in(message[start:], message[_LENGTH.size : start].tobytes(), hello)


def headers_from_bytes(data: bytes) -> Sequence[kv_pb2.FrameHeader]:
    """Return what a message says of its frames; the opposite of ``frame_headers``.

    Raises:
        TransferDamaged: It says nothing, or speaks of more frames than any sender sends.
    """
    if len(data) > _MAX_HEADER_BYTES:
        raise TransferDamaged(f"a header of {len(data)} bytes is larger than {_MAX_HEADER_BYTES}")
    try:
        headers = kv_pb2.PushHeader.FromString(data).frames
    except DecodeError as error:
        raise TransferDamaged(f"the header of a message cannot be read: {error}") from None
    if len(headers) > MAX_FRAMES:
        raise TransferDamaged(f"{len(headers)} frames in one message are more than {MAX_FRAMES}")
    return headers


def frames_in(payloads: memoryview, header: bytes, hello: Hello) -> list[Frame]:
    """Cut the payloads of one message into frames, as its header says.

    Raises:
        TransferDamaged: The header is none, or speaks of other payloads.
    """
    parts = headers_from_bytes(header)
    if sum(part.payload_bytes for part in parts) != len(payloads):
        raise TransferDamaged("the payloads named in a header do not fill its message")
    frames = []
    start = 0
    for part in parts:
        payload = HostPayload([payloads[start : start + part.payload_bytes]])
        start += part.payload_bytes
        frames.append(frame_of(part, hello, payload))
    return frames


def frame_of(part: kv_pb2.FrameHeader, hello: Hello, payload: KVPayload) -> Frame:
    """Return the frame of a header; what it does not say is said by the hello of its channel."""
    return Frame(
        transfer_id=hello.transfer_id,
        epoch=hello.epoch,
        first_head=hello.first_head,
        num_heads=hello.num_heads,
        layer=part.layer,
        first_token=part.first_token,
        num_tokens=part.num_tokens,
        checksum=part.checksum,
        payload=payload,
    )


def credit_reply(num_bytes: int) -> bytes:
    """Return the receiver's message that grants credit."""
    return kv_pb2.PushReply(credit_bytes=num_bytes).SerializeToString()


def end_reply(error: TransferError | None) -> bytes:
    """Return the receiver's last message: everything arrived, or what ended the transfer."""
    if error is None:
        return kv_pb2.PushReply(complete=True).SerializeToString()
    return kv_pb2.PushReply(error=type(error).__name__, detail=str(error)).SerializeToString()


def read_reply(data: bytes, *, address: str) -> int | None:
    """Return the credit that a receiver's message grants; None if it says that everything arrived.

    Raises:
        TransferError: It says what ended the transfer, or cannot be read.
    """
    try:
        reply = kv_pb2.PushReply.FromString(data)
    except DecodeError as error:
        raise TransferDamaged(f"{address}: {error}") from None
    if reply.error:
        raise error_named(reply.error, f"{address}: {reply.detail}")
    return None if reply.complete else reply.credit_bytes
