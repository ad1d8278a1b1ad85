"""The slots of a lane: staging memory in which messages are put together, or taken apart.

One row of a tensor is one slot.  On a GPU every copy runs on a stream of the slots' own, tied to the
streams of others by events, so that neither the engine nor its stream waits for a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_transfer.pair.lane import Placed, Segment, SlotShape
from twinpool.core.errors import TransferError
from twinpool.core.payload import DevicePayload, HostPayload
from twinpool.core.ports import KVPayload

_LARGE_BYTES = 512 * 2**10  # to copy less is cheaper than to move it by itself
_MOST_IN_PLACE = 32  # pieces of one slot


@dataclass(frozen=True, slots=True, eq=False)
class StagedSlot:
    """A slot that is ready to be sent; implements ``lane.Staged``."""

    segments: tuple[Segment, ...]
    tensors: tuple[Tensor, ...]  # the bytes of each
    checksums: tuple[int, ...]
    reads_payloads: bool = False


class Slots(Protocol):
    """Slots on any device; see ``HostSlots``."""

    def slot(self, number: int, segment: Segment) -> Tensor: ...
    def mark(self, payloads: Sequence[KVPayload]) -> object: ...
    def stage(self, number: int, placed: Sequence[Placed]) -> StagedSlot: ...
    def stage_in_place(self, number: int, placed: Sequence[Placed]) -> StagedSlot: ...
    def payload(self, number: int, start: int, num_bytes: int) -> KVPayload: ...
    def release(self, number: int) -> None: ...
    def writing(self, number: int) -> AbstractContextManager[Any]: ...
    def on_stream(self) -> AbstractContextManager[Any]: ...
    def begun(self) -> Callable[[], None]: ...


class HostSlots:
    """Slots in host memory.

    Args:
        rows: [number of slots, bytes of each], uint8.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._bytes: npt.NDArray[np.uint8] = rows.numpy()

    def slot(self, number: int, segment: Segment) -> Tensor:
        """Return the bytes of a slot that a segment fills."""
        return self._rows[number, segment.start : segment.start + segment.num_bytes]

    def mark(self, payloads: Sequence[KVPayload]) -> object:
        """Note, in the thread that made the payloads, that they were made; goes into ``Placed``."""
        return None

    def stage(self, number: int, placed: Sequence[Placed]) -> StagedSlot:
        """Copy payloads into a slot; they are not read any more after the return."""
        return self._stage(number, placed, most_in_place=0)

    def stage_in_place(self, number: int, placed: Sequence[Placed]) -> StagedSlot:
        """As ``stage``, but large pieces of host memory stay where they are, and are read there."""
        return self._stage(number, placed, most_in_place=_MOST_IN_PLACE)

    def _stage(self, number: int, placed: Sequence[Placed], *, most_in_place: int) -> StagedSlot:
        slot = self._bytes[number]
        pieces: list[tuple[Segment, Tensor]] = []
        copied = end = 0  # the slot's own bytes from ``copied`` to ``end`` are not in ``pieces`` yet
        num_in_place = 0
        checksums = []
        for each in placed:
            slot[end : each.start] = 0  # nothing that was here before travels
            end = each.start + each.frame.payload.nbytes
            views = _large_views(each.frame.payload) if num_in_place < most_in_place else ()
            if views:
                pieces += self._own(number, copied, each.start)
                copied = each.start
                for view in views:
                    data = torch.from_numpy(np.frombuffer(view, np.uint8))
                    pieces.append((Segment(copied, view.nbytes), data))
                    copied += view.nbytes
                num_in_place += len(views)
                checksums.append(each.frame.seal())
            else:
                checksums.append(each.frame.copied(slot[each.start : end].data).seal())
        pieces += self._own(number, copied, end)
        segments, tensors = zip(*pieces, strict=True) if pieces else ((), ())
        return StagedSlot(segments, tensors, tuple(checksums), reads_payloads=num_in_place > 0)

    def _own(self, number: int, start: int, end: int) -> list[tuple[Segment, Tensor]]:
        """Return the slot's own bytes from ``start`` to ``end`` as a segment, if there are any."""
        return [(Segment(start, end - start), self._rows[number, start:end])] if start < end else []

    def payload(self, number: int, start: int, num_bytes: int) -> KVPayload:
        """Return a part of a slot, not copied."""
        return HostPayload([self._bytes[number, start : start + num_bytes].data])

    def release(self, number: int) -> None:
        """Note, in the thread that uses payloads of the slot, that it has used the last."""

    def writing(self, number: int) -> AbstractContextManager[Any]:
        """Return what to begin the filling of a slot in, once its payloads are not used any more."""
        return nullcontext()

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return what to wait for copies in, so that nobody else's stream waits."""
        return nullcontext()

    def begun(self) -> Callable[[], None]:
        """Return what blocks until the copies that were begun up to now are done."""
        return lambda: None


class DeviceSlots:
    """Slots on a GPU; the methods do what those of ``HostSlots`` do.  Never run on a GPU so far.

    Args:
        rows: [number of slots, bytes of each], uint8, on the GPU.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._stream = torch.cuda.Stream(device=rows.device)  # type: ignore[no-untyped-call]
        self._released: dict[int, torch.cuda.Event] = {}

    def slot(self, number: int, segment: Segment) -> Tensor:
        return self._rows[number, segment.start : segment.start + segment.num_bytes]

    def mark(self, payloads: Sequence[KVPayload]) -> object:
        tensors = [payload.tensor() for payload in payloads]
        devices = {tensor.device for tensor in tensors if tensor is not None}
        return [torch.cuda.current_stream(device).record_event() for device in devices]

    def stage(self, number: int, placed: Sequence[Placed]) -> StagedSlot:
        checksums = []
        end = 0
        with self.writing(number):
            for event in {id(each.mark): each.mark for each in placed}.values():
                for made in cast(list[torch.cuda.Event], event):
                    self._stream.wait_event(made)
            for each in placed:
                payload = each.frame.payload
                self._rows[number, end : each.start] = 0  # nothing that was here before travels
                end = each.start + payload.nbytes
                source = payload.tensor()
                data = _on_host(payload) if source is None else source
                self._rows[number, each.start : end].copy_(data, non_blocking=True)
                checksums.append(each.frame.seal())
            self.begun()()
        if not end:
            return StagedSlot((), (), tuple(checksums))
        return StagedSlot((Segment(0, end),), (self._rows[number, :end],), tuple(checksums))

    def stage_in_place(self, number: int, placed: Sequence[Placed]) -> StagedSlot:
        return self.stage(number, placed)

    def payload(self, number: int, start: int, num_bytes: int) -> KVPayload:
        return DevicePayload(self._rows[number, start : start + num_bytes])

    def release(self, number: int) -> None:
        self._released[number] = torch.cuda.current_stream(self._rows.device).record_event()

    def writing(self, number: int) -> AbstractContextManager[Any]:
        released = self._released.pop(number, None)
        if released is not None:
            self._stream.wait_event(released)
        return cast(AbstractContextManager[Any], torch.cuda.stream(self._stream))

    def on_stream(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], torch.cuda.stream(self._stream))

    def begun(self) -> Callable[[], None]:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        wait: Callable[[], None] = done.synchronize  # sleeps rather than spins
        return wait


def empty_rows(shape: SlotShape, device: torch.device) -> Tensor:
    """Return memory for slots, which holds anything.

    Raises:
        TransferError: The device has no more.
    """
    try:
        return torch.empty((shape.num_slots, shape.slot_bytes), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise TransferError(f"no room for slots on {device}: {str(error).splitlines()[0]}") from None


def make_slots(rows: Tensor) -> Slots:
    """Return the slots in ``rows``, wherever that is."""
    return HostSlots(rows) if rows.device.type == "cpu" else DeviceSlots(rows)


def _large_views(payload: KVPayload) -> tuple[memoryview, ...]:
    """Return the pieces of a payload if each is large enough to move by itself; none otherwise."""
    if payload.nbytes < _LARGE_BYTES:
        return ()
    views = payload.views()
    is_large = all(view.nbytes >= _LARGE_BYTES and not view.readonly for view in views)
    return views if is_large else ()


def _on_host(payload: KVPayload) -> Tensor:
    return torch.frombuffer(bytearray().join(payload.views()), dtype=torch.uint8)
