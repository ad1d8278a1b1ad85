"""Messages as bytes: what is packed is what is unpacked, with the checksums of what was packed."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.messages import frames_in, headers_from_bytes, pack, unpack
from twinpool.core.errors import TransferDamaged
from twinpool.core.payload import HostPayload
from twinpool.pb.kv_pb2 import FrameHeader, PushHeader

HELLO = Hello(
    transfer_id="t",
    epoch=1,
    sender_id="prefill",
    source_rank=0,
    target_rank=0,
    first_head=0,
    num_heads=2,
    wire="float32",
)


def frame(layer: int, *pieces: bytes, checksum: int | None = None) -> Frame:
    return Frame(
        transfer_id="t",
        epoch=1,
        first_head=0,
        num_heads=2,
        layer=layer,
        first_token=0,
        num_tokens=1,
        checksum=checksum,
        payload=HostPayload(map(memoryview, pieces)),
    )


def test_a_message_is_a_length_a_header_and_the_payloads() -> None:
    frames = [frame(0, b"keys", b"and values"), frame(1, b""), frame(2, b"x" * 3000)]

    header = PushHeader(
        frames=[
            FrameHeader(
                layer=each.layer,
                num_tokens=1,
                checksum=each.true_checksum(),
                payload_bytes=each.payload.nbytes,
            )
            for each in frames
        ]
    ).SerializeToString()
    assert pack(frames) == struct.pack("<I", len(header)) + header + b"keysand values" + b"x" * 3000


@pytest.mark.parametrize("checksum", [None, 0, 5, 2**64 - 1])
def test_what_is_packed_is_what_is_unpacked(checksum: int | None) -> None:
    frames = [frame(0, b"a" * 100, checksum=checksum), frame(1, b"b", b"c", checksum=checksum)]

    unpacked = unpack(memoryview(pack(frames)), HELLO)

    assert [each.payload.joined() for each in unpacked] == [b"a" * 100, b"bc"]
    expected = [each.true_checksum() if checksum is None else checksum for each in frames]
    assert [each.checksum for each in unpacked] == expected


def test_a_frame_whose_true_checksum_is_zero_is_packed_too() -> None:
    class ZeroPayload(HostPayload):
        def checksum(self, identity: bytes) -> int:
            return 0

    class ZeroFrame(Frame):
        def copied(self, target: memoryview) -> Frame:
            self.payload.copy_into(target)
            return replace(self, payload=ZeroPayload([target]))

    plain = frame(3, b"payload")
    zero = ZeroFrame(**{name: getattr(plain, name) for name in Frame.__slots__})

    (unpacked,) = unpack(memoryview(pack([zero])), HELLO)

    assert (unpacked.layer, unpacked.checksum) == (3, 0)
    assert unpacked.payload.joined() == b"payload"


def test_a_header_of_more_frames_than_a_sender_sends_is_refused_before_they_are_made() -> None:
    most = b"\x0a\x00" * 8192  # each an empty FrameHeader

    assert len(headers_from_bytes(most)) == 8192
    with pytest.raises(TransferDamaged, match="8193 frames in one message are more than 8192"):
        frames_in(memoryview(b""), most + b"\x0a\x00", HELLO)


def test_a_header_of_more_than_a_mebibyte_is_not_read() -> None:
    with pytest.raises(TransferDamaged, match="a header of 1048577 bytes is larger than 1048576"):
        frames_in(memoryview(b""), bytes(2**20 + 1), HELLO)
