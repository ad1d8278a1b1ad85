"""Lanes over memory that one process lets another read: the sender stages a slot, the receiver copies it.

    sender    puts payloads into a slot of memory that it has shown, waits until they are there, and says so
    receiver  copies the slot into one of its own, waits until that is done, and gives the slot back

What the receiver checks and writes is its own copy: a sender that changes its memory meanwhile spoils a
checksum and nothing else.  Memory that was shown is never freed while the process lives, since nobody can
tell when a peer that was given up has stopped reading it; the next pair uses it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kv_transfer.config import TransferConfig
from kv_transfer.lanes.slots import Slots, StagedSlot, empty_rows, make_slots
from kv_transfer.pair.greeting import bytes_in, shape_in
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import NoMove, Offer, Placed, Segment, SlotShape, end_of, slot_shape
from twinpool.core.errors import TransferError
from twinpool.core.ports import KVPayload

HANDLE_BYTES = 64
_NONCE_BYTES = 32


class Shown(Protocol):
    """Memory of this process that others may read.

    Attributes:
        data: Its bytes, uint8.
        handle: 64 bytes by which another process finds it.
    """

    data: Tensor
    handle: bytes


class Seen(Protocol):
    """Memory of another process."""

    def read_into(self, target: Tensor, start: int) -> None:
        """Begin to copy bytes from ``start`` on, as many as ``target`` holds, on the current stream."""
        ...

    def close(self) -> None:
        """Let go of it; nothing is being copied any more."""
        ...


class DeviceMemory(Protocol):
    """Memory of one device, as processes of one machine share it.

    Attributes:
        device: Where it is.
        identity: What peers must know to tell whether they can read it.
    """

    device: torch.device
    identity: str

    def reaches(self, identity: str) -> bool:
        """Return whether memory of a peer can be read here, as far as its identity tells."""
        ...

    def show(self, num_bytes: int) -> Shown:
        """Set memory aside that others may read; blocks.

        Raises:
            TransferError: There is none left.
        """
        ...

    def see(self, handle: bytes) -> Seen:
        """Open memory that another process has shown; blocks.

        Raises:
            TransferError: It cannot be read from here.
        """
        ...


class IpcLanes:
    """Makes the lanes of one rank.

    Args:
        config: Credit.
        memory: Of the rank's device.
    """

    def __init__(self, config: TransferConfig, memory: DeviceMemory) -> None:
        self.moves_tensors = memory.device.type != "cpu"
        self._memory = memory
        self._shape = slot_shape(config.credit_bytes)
        self._spare: list[Shown] = []  # shown to pairs that are over

    def to_peer(self, local_host: str) -> IpcSendLane:
        shape = self._shape
        shown = self._spare.pop() if self._spare else self._memory.show(shape.num_slots * shape.slot_bytes)
        return IpcSendLane(shown, shape, self._spare)

    def from_peer(self, offer: Offer, *, sender_id: str, local_host: str) -> IpcReceiveLane:
        return IpcReceiveLane(self._memory, offer, shape_in(offer, own=self._shape))


class IpcSendLane:
    """The sender's end: memory to read from.

    Args:
        shown: As much as the slots take.
        shape: Of the slots.
        spare: Where the memory goes when the lane is closed.
    """

    def __init__(self, shown: Shown, shape: SlotShape, spare: list[Shown]) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._shown = shown
        self._spare = spare
        self._slots: Slots = make_slots(shown.data.view(shape.num_slots, shape.slot_bytes))
        with self._slots.writing(0):
            shown.data[:_NONCE_BYTES].copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
        self._slots.begun()()
        self.shape = shape
        self.offer: Offer = {**shape.offer(), "handle": shown.handle.hex(), "nonce": nonce.hex()}

    def connect(self, answer: Offer, keys: KeyExchange) -> None:
        """Do nothing: it is the receiver who must find this end."""

    def mark(self, payloads: Sequence[KVPayload]) -> object:
        return self._slots.mark(payloads)

    def stage(self, slot: int, placed: Sequence[Placed]) -> StagedSlot:
        return self._slots.stage(slot, placed)

    def send(self, slot: int, staged: StagedSlot) -> NoMove:
        return NoMove()

    def cut(self) -> None:
        """Do nothing: no call of this end waits for the peer."""

    def close(self) -> None:
        self._spare.append(self._shown)


class IpcReceiveLane:
    """The receiver's end: copies slots, and knows when that is done.

    Args:
        memory: Of this rank's device.
        offer: Of the sender.
        shape: Of its slots, and of ours.

    Raises:
        TransferDamaged: The offer does not say what it must.
    """

    def __init__(self, memory: DeviceMemory, offer: Offer, shape: SlotShape) -> None:
        self._handle = bytes_in(offer, "handle", num_bytes=HANDLE_BYTES)
        self._nonce = bytes_in(offer, "nonce", num_bytes=_NONCE_BYTES)
        self._memory = memory
        self.shape = shape
        self.answer: Offer = {}
        self._slots: Slots = make_slots(empty_rows(self.shape, memory.device))
        self._seen: Seen | None = None

    def connect(self, keys: KeyExchange) -> None:
        self._seen = self._memory.see(self._handle)
        start = Segment(0, _NONCE_BYTES)
        self.receive(0, 0, [start]).wait()
        with self._slots.on_stream():
            found = bytes(self._slots.slot(0, start).cpu().numpy())
        if found != self._nonce:
            raise TransferError("the memory that was shown is not the peer's")

    def receive(self, their_slot: int, slot: int, segments: Sequence[Segment]) -> _Copy:
        assert self._seen is not None, "connected before"
        own = self._slots.slot(slot, Segment(0, end_of(segments)))
        with self._slots.writing(slot):
            self._seen.read_into(own, their_slot * self.shape.slot_bytes)
        return _Copy(self._slots)

    def payload(self, slot: int, start: int, num_bytes: int) -> KVPayload:
        return self._slots.payload(slot, start, num_bytes)

    def release(self, slot: int) -> None:
        self._slots.release(slot)

    def cut(self) -> None:
        """Do nothing: a copy ends by itself, whatever becomes of the peer."""

    def close(self) -> None:
        if self._seen is not None:
            self._seen.close()


class _Copy:
    """A slot that is being copied."""

    def __init__(self, slots: Slots) -> None:
        self._done = slots.begun()

    def wait(self) -> None:
        self._done()
