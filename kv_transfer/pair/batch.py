"""Messages of several channels that travel together in one slot: who they belong to, and where they lie.

    slot (4 bytes), number of segments (4), number of messages (4),
    for each segment: start (4), number of bytes (4),
    for each message: channel (4), length of its header (4), its header

The payloads follow each other in the slot in the order of their frames, each at a multiple of 16 bytes.  A
segment moves at once; together they hold all payloads.  A batch has no more frames than one message may have.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_transfer.frame import Frame
from kv_transfer.messages import MAX_FRAMES, header_of, headers_from_bytes
from kv_transfer.pair.lane import Segment
from twinpool.core.errors import TransferDamaged
from twinpool.pb import kv_pb2

_ALIGNMENT = 16  # of every element type, and of the copies of a GPU
_COUNTS = struct.Struct("<III")
_PAIR = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Part:
    """One message of a batch: the headers of its frames, and where each payload begins."""

    channel: int
    headers: tuple[kv_pb2.FrameHeader, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What lies in one slot."""

    slot: int
    segments: tuple[Segment, ...]
    parts: tuple[Part, ...]
    num_bytes: int  # that must lie in it


def slot_bytes(sizes: Iterable[int]) -> int:
    """Return how much of a slot payloads of these sizes take."""
    return sum(aligned(size) for size in sizes)


def aligned(num_bytes: int) -> int:
    """Return where the next payload may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def batch_to_bytes(
    slot: int, segments: Sequence[Segment], messages: Sequence[tuple[int, Sequence[Frame]]]
) -> bytes:
    """Return the message of a batch: channels, each with its frames."""
    data = [_COUNTS.pack(slot, len(segments), len(messages))]
    data += [_PAIR.pack(segment.start, segment.num_bytes) for segment in segments]
    for channel, frames in messages:
        data += [channel.to_bytes(4, "little"), header_of(frames)]
    return b"".join(data)


def batch_from_bytes(data: bytes) -> Batch:
    """Read the message of a batch.

    Raises:
        TransferDamaged: It is none, or its segments do not hold its payloads.
    """
    try:
        slot, num_segments, num_messages = _COUNTS.unpack_from(data)
        at, start = _COUNTS.size + num_segments * _PAIR.size, 0
        segments = tuple(Segment(*pair) for pair in _PAIR.iter_unpack(data[_COUNTS.size : at]))
        parts, num_frames = [], 0
        for _ in range(num_messages):
            channel, length = _PAIR.unpack_from(data, at)
            at += _PAIR.size + length
            headers = tuple(headers_from_bytes(data[at - length : at]))
            num_frames += len(headers)
            if num_frames > MAX_FRAMES:
                raise TransferDamaged(f"{num_frames} frames in one batch are more than {MAX_FRAMES}")
            starts = []
            for header in headers:
                starts.append(start)
                start += aligned(header.payload_bytes)
            parts.append(Part(channel, headers, tuple(starts)))
    except struct.error as error:
        raise TransferDamaged(f"a batch that cannot be read: {error}") from None
    if at != len(data) or len(segments) != num_segments:
        raise TransferDamaged("a batch that is longer or shorter than it says")
    end = 0
    for segment in segments:
        if not segment.num_bytes or not end <= segment.start < end + _ALIGNMENT:
            raise TransferDamaged("segments of a batch that do not follow each other")
        end = segment.start + segment.num_bytes
    if aligned(end) != start:
        raise TransferDamaged(f"segments of {end} bytes for payloads of {start}")
    return Batch(slot, segments, tuple(parts), start)
