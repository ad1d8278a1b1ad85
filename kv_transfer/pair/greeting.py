"""The first two messages of a pair: what each lane must know of the other, and for which part they meet."""

from __future__ import annotations

import json
import struct

from kv_transfer.hello import Hello
from kv_transfer.messages import MAX_HELLO_BYTES, hello_from_bytes, hello_to_bytes
from kv_transfer.pair.lane import MOST, Offer, SlotShape
from twinpool.core.errors import TransferDamaged, TransferError

_LENGTH = struct.Struct("<H")
_MOST_BYTES = 2 * MAX_HELLO_BYTES


def greeting_to_bytes(offer: Offer, hello: Hello) -> bytes:
    """Return the sender's first message."""
    said = hello_to_bytes(hello)
    return _LENGTH.pack(len(said)) + said + answer_to_bytes(offer)


def greeting_from_bytes(data: bytes) -> tuple[Offer, Hello]:
    """Read the sender's first message.

    Raises:
        TransferDamaged: It is none.
    """
    end = _LENGTH.size + int.from_bytes(data[: _LENGTH.size], "little")
    return answer_from_bytes(data[end:]), hello_from_bytes(data[_LENGTH.size : end])


def answer_to_bytes(offer: Offer) -> bytes:
    """Return what a lane says of itself."""
    return json.dumps(dict(offer)).encode()


def answer_from_bytes(data: bytes) -> Offer:
    """Read what a lane says of itself: names with a text or a number each.

    Raises:
        TransferDamaged: It is none.
    """
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError
        offer = json.loads(data)
        if not isinstance(offer, dict) or not all(type(value) in (str, int) for value in offer.values()):
            raise ValueError
    except (ValueError, RecursionError):
        raise TransferDamaged("the first message does not say how bytes are to move") from None
    return offer


def text_in(offer: Offer, name: str) -> str:
    """Return a text that a lane must say of itself.

    Raises:
        TransferDamaged: It does not.
    """
    value = offer.get(name)
    if not isinstance(value, str):
        raise TransferDamaged(f"{name}: the peer does not say it")
    return value


def number_in(offer: Offer, name: str, *, most: int) -> int:
    """Return a number that a lane must say of itself, from 1 to ``most``; raises as ``text_in`` does."""
    value = offer.get(name)
    if not isinstance(value, int) or not 1 <= value <= most:
        raise TransferDamaged(f"{name}: {value} is not between 1 and {most}")
    return value


def bytes_in(offer: Offer, name: str, *, num_bytes: int) -> bytes:
    """Return bytes of known length that a lane must say of itself, in hex; raises as ``text_in`` does."""
    try:
        value = bytes.fromhex(text_in(offer, name))
    except ValueError:
        value = b""
    if len(value) != num_bytes:
        raise TransferDamaged(f"{name}: the peer says no {num_bytes} bytes in hex")
    return value


def shape_in(offer: Offer, *, own: SlotShape = MOST) -> SlotShape:
    """Return the slots of a sender, as many and as large as which a receiver sets aside.

    Raises:
        TransferDamaged: As ``text_in``, or nobody has such slots.
        TransferError: They are more or larger than ``own``: the two workers give different credit.
    """
    shape = SlotShape(
        num_slots=number_in(offer, "num_slots", most=MOST.num_slots),
        slot_bytes=number_in(offer, "slot_bytes", most=MOST.slot_bytes),
    )
    if shape.num_slots > own.num_slots or shape.slot_bytes > own.slot_bytes:
        raise TransferError(
            f"transfer.credit_bytes: the sender's asks for {shape.num_slots} slots of {shape.slot_bytes} "
            f"bytes, this worker's gives {own.num_slots} of {own.slot_bytes}"
        )
    return shape
