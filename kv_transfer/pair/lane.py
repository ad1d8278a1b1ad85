"""What a pair needs of whatever moves its bytes: slots on both sides, and a way from one to the other.

A lane blocks, so it lives in threads: ``filler`` calls ``connect``, ``stage``, ``send`` and ``receive``,
``waiter`` waits for moves.  What is said to be is called on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kv_transfer.config import MAX_MESSAGE_BYTES
from kv_transfer.frame import Frame
from kv_transfer.pair.keys import KeyExchange
from twinpool.core.ports import KVPayload

Offer = Mapping[str, str | int]

_SLOTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """How a sender keeps what is under way; a receiver has as many slots, as large."""

    num_slots: int
    slot_bytes: int

    def offer(self) -> dict[str, str | int]:
        """Return it as a part of an offer."""
        return {"num_slots": self.num_slots, "slot_bytes": self.slot_bytes}


MOST = SlotShape(num_slots=8, slot_bytes=64 * 2**20)  # so that a peer cannot make us set aside more


def slot_shape(credit_bytes: int) -> SlotShape:
    """Return slots that hold any one message, and together what one part may have in flight.

    One is filled while one is under way and one is taken.
    """
    slot_bytes = max(credit_bytes // _SLOTS, MAX_MESSAGE_BYTES)
    return SlotShape(num_slots=_SLOTS, slot_bytes=min(slot_bytes, MOST.slot_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where in a slot the payload of a frame belongs."""

    start: int
    frame: Frame
    mark: object  # what ``SendLane.mark`` returned when the frame was handed over


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes that move at once, and where in the receiver's slot they belong."""

    start: int
    num_bytes: int


def end_of(segments: Sequence[Segment]) -> int:
    """Return how much of a slot segments fill."""
    return segments[-1].start + segments[-1].num_bytes if segments else 0


class Staged(Protocol):
    """A slot that is ready to be sent.

    Attributes:
        segments: In the order in which they move; the receiver must know them.
        reads_payloads: Some move from where they were, so that payloads are read until they have left.
        checksums: Of the frames, in their order.
    """

    @property
    def segments(self) -> Sequence[Segment]: ...

    @property
    def reads_payloads(self) -> bool: ...

    @property
    def checksums(self) -> Sequence[int]: ...


class Move(Protocol):
    """Bytes under way."""

    def wait(self) -> None:
        """Block until they are there.

        Raises:
            TransferError: They will not come.
        """
        ...


class NoMove:
    """Nothing is under way."""

    def wait(self) -> None:
        return


class SendLane(Protocol):
    """The sender's end.

    Attributes:
        offer: What the receiver must know before the two can connect.
        shape: Of its slots.
    """

    offer: Offer
    shape: SlotShape

    def connect(self, answer: Offer, keys: KeyExchange) -> None:
        """Find the other end and prove that bytes arrive; blocks.

        Raises:
            TransferError: There is no way to it.
        """
        ...

    def mark(self, payloads: Sequence[KVPayload]) -> object:
        """Note, on the loop, that payloads were made just now, on the loop's own stream of their device."""
        ...

    def stage(self, slot: int, placed: Sequence[Placed]) -> Staged:
        """Copy payloads into a free slot, but for those that can go as they are; seal frames.  Blocks."""
        ...

    def send(self, slot: int, staged: Any) -> Move:
        """Begin to move a slot; ``staged`` is what ``stage`` returned for it."""
        ...

    def cut(self) -> None:
        """Make every blocked call fail soon; from any thread.  Idempotent."""
        ...

    def close(self) -> None:
        """Free everything; no other call is running, and the peer is gone.  Blocks."""
        ...


class ReceiveLane(Protocol):
    """The receiver's end; it has slots of its own, as large and as many as the sender's.

    Attributes:
        answer: What the sender must know of it.
        shape: Of the slots.
    """

    answer: Offer
    shape: SlotShape

    def connect(self, keys: KeyExchange) -> None:
        """See ``SendLane.connect``."""
        ...

    def receive(self, their_slot: int, slot: int, segments: Sequence[Segment]) -> Move:
        """Begin to fill an own slot with what the sender has in one of its own."""
        ...

    def payload(self, slot: int, start: int, num_bytes: int) -> KVPayload:
        """Return a part of a filled slot; on the loop."""
        ...

    def release(self, slot: int) -> None:
        """Note, on the loop, that the slot's payloads were used just now, on the loop's own stream."""
        ...

    def cut(self) -> None:
        """See ``SendLane.cut``."""
        ...

    def close(self) -> None:
        """See ``SendLane.close``."""
        ...


class Lanes(Protocol):
    """Makes lanes of one kind.

    Attributes:
        moves_tensors: Payloads are asked for as tensors on their device.
    """

    moves_tensors: bool

    def to_peer(self, local_host: str) -> SendLane:
        """Make the sender's end.

        Args:
            local_host: The address of this machine that the peer is connected with.
        """
        ...

    def from_peer(self, offer: Offer, *, sender_id: str, local_host: str) -> ReceiveLane:
        """Make the receiver's end.

        Raises:
            TransferError: The two cannot work together; the message names what differs.
        """
        ...
