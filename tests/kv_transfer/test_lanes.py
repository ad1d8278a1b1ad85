"""What a GPU would use of the lanes, as far as it runs without one: order of streams, options of NCCL."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer.frame import Frame
from kv_transfer.lanes import two_ranks
from kv_transfer.lanes.slots import DeviceSlots, HostSlots
from kv_transfer.lanes.two_ranks import TwoRanks
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import Placed, Segment
from twinpool.core.errors import TransferError
from twinpool.core.payload import DevicePayload, HostPayload
from twinpool.core.ports import KVPayload


class FakeStreams:
    """CUDA's streams and events, which only take note of what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self._numbers = itertools.count()
        self.current = _Stream(self, "engine")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(self, "slots"))
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: _Event(self, f"e{next(self._numbers)}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._in)

    @contextmanager
    def _in(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self) -> _Event:
        return _Event(self, f"e{next(self._numbers)}")


class _Stream:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams = streams
        self.name = name

    def wait_event(self, event: _Event) -> None:
        self._streams.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> _Event:
        event = self._streams.event()
        event.record(self)
        return event


class _Event:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams = streams
        self.name = name

    def record(self, stream: _Stream) -> None:
        self._streams.log.append(f"{stream.name} records {self.name}")

    def synchronize(self) -> None:
        self._streams.log.append(f"the thread waits for {self.name}")


def frame(payload: KVPayload, *, checksum: int | None = None) -> Frame:
    return Frame(
        transfer_id="t",
        epoch=1,
        first_head=0,
        num_heads=1,
        layer=0,
        first_token=0,
        num_tokens=1,
        checksum=checksum,
        payload=payload,
    )


def test_copies_of_a_gpu_wait_for_what_was_made_and_used_and_the_engine_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = FakeStreams(monkeypatch)
    slots = DeviceSlots(torch.zeros((2, 64), dtype=torch.uint8))
    payload = DevicePayload(torch.arange(32, dtype=torch.uint8))
    mark = slots.mark([payload])
    staged = slots.stage(0, [Placed(0, frame(payload), mark)])
    slots.release(0)
    with slots.writing(0):
        pass
    with slots.writing(0):
        pass

    assert streams.log == [
        "engine records e0",  # the payload is made
        "slots waits for e0",
        "slots records e1",  # it is copied
        "the thread waits for e1",
        "engine records e2",  # the sink has used the slot
        "slots waits for e2",  # once, before it is filled again
    ]
    assert staged.tensors[0].tolist() == list(range(32))
    assert staged.segments == (Segment(0, 32),)
    assert staged.checksums == (frame(payload).true_checksum(),)


def test_host_memory_goes_to_slots_of_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeStreams(monkeypatch)
    slots = DeviceSlots(torch.full((1, 64), 255, dtype=torch.uint8))
    payload = HostPayload([memoryview(bytes(range(5))), memoryview(bytes(range(5, 10)))])
    placed = [Placed(start, frame(payload), slots.mark([payload])) for start in (0, 16)]
    staged = slots.stage(0, placed)

    assert staged.tensors[0].tolist() == [*range(10), *[0] * 6, *range(10)]
    assert bytes(slots.payload(0, 16, 10).views()[0]) == bytes(range(10))


def test_small_pieces_are_copied_and_large_ones_stay_where_they_are() -> None:
    small, large = memoryview(bytearray(b"s" * 24)), memoryview(bytearray(b"l" * 2**19))
    slots = HostSlots(torch.full((1, 2**21), 255, dtype=torch.uint8))
    payloads = [HostPayload([small]), HostPayload([large, large]), HostPayload([small, large])]
    starts = (0, 32, 32 + 2**20)
    staged = slots.stage_in_place(
        0, [Placed(*each, None) for each in zip(starts, map(frame, payloads), strict=True)]
    )

    assert staged.segments == (
        Segment(0, 32),
        Segment(32, 2**19),
        Segment(32 + 2**19, 2**19),
        Segment(32 + 2**20, 24 + 2**19),
    )
    assert [bytes(data.numpy()) for data in staged.tensors] == [
        b"s" * 24 + bytes(8),  # what was in the slot before does not travel
        b"l" * 2**19,
        b"l" * 2**19,
        b"s" * 24 + b"l" * 2**19,
    ]
    assert staged.checksums == tuple(frame(payload).true_checksum() for payload in payloads)
    assert staged.reads_payloads
    large[0] = ord("x")
    assert staged.tensors[1][0] == ord("x")
    assert staged.tensors[3][24] == ord("l")
    assert not slots.stage(0, [Placed(0, frame(payloads[1]), None)]).reads_payloads


def test_read_only_memory_is_copied() -> None:
    slots = HostSlots(torch.zeros((1, 2**20), dtype=torch.uint8))
    staged = slots.stage_in_place(0, [Placed(0, frame(HostPayload([memoryview(bytes(2**19))])), None)])

    assert not staged.reads_payloads


def test_a_frame_that_has_a_checksum_keeps_it() -> None:
    slots = HostSlots(torch.zeros((1, 64), dtype=torch.uint8))
    payload = HostPayload([memoryview(b"0123456789abcdef")])

    staged = slots.stage(0, [Placed(0, frame(payload, checksum=5), None), Placed(16, frame(payload), None)])

    assert staged.checksums == (5, frame(payload).true_checksum())


class FakeNccl:
    """``torch.distributed.ProcessGroupNCCL``, as far as a group is made of it."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=None, max_ctas=None)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        self.rank, self.size, self.options = rank, size, options
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_of_nccl_has_no_watchdog_few_channels_and_can_be_aborted(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)

    ranks = TwoRanks("nccl", KeyExchange(lambda data: None), rank=1, local_host="", stall_s=7.0)
    group: FakeNccl = ranks._group
    ranks.cut()

    assert group.blocking_wait == "1"
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before, "the engine's own groups are as they were"
    assert (group.rank, group.size) == (1, 2)
    assert group.options._timeout.total_seconds() == 7.0
    assert (group.options.config.min_ctas, group.options.config.max_ctas) == (1, two_ranks._MAX_CTAS)
    assert group.num_aborts == 1


def test_bytes_that_arrive_while_a_group_is_aborted_are_not_taken_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    ranks = TwoRanks("nccl", KeyExchange(lambda data: None), rank=0, local_host="", stall_s=1.0)
    ranks.cut()

    with pytest.raises(TransferError, match="was cut"):
        ranks.wait(SimpleNamespace(wait=lambda limit: True))  # type: ignore[arg-type]
