"""Lanes over process groups of two ranks: gloo between CPUs, NCCL between GPUs, by the same code.

A slot is sent whole, from the sender's staging memory into the receiver's.  Both begin the same moves in
the same order, since the sender says on the pair's connection what it sends.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from kv_transfer import nccl
from kv_transfer.config import TransferConfig
from kv_transfer.lanes.slots import Slots, StagedSlot, empty_rows, make_slots
from kv_transfer.lanes.two_ranks import TwoRanks
from kv_transfer.pair.greeting import bytes_in, shape_in, text_in
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import Offer, Placed, Segment, SlotShape, slot_shape
from twinpool.core.errors import TransferError
from twinpool.core.ports import KVPayload

_NONCE_BYTES = 32


class GroupLanes:
    """Makes the lanes of one rank.

    Args:
        config: Credit and deadlines.

    Attributes:
        backend: "nccl" where this process uses a GPU and torch has NCCL, else "gloo".
        version: Of what must be equal at both ends.
    """

    def __init__(self, config: TransferConfig) -> None:
        # A worker on a GPU has made its cache there before it opens its transports.
        has_gpu = torch.cuda.is_initialized() and dist.is_nccl_available()  # type: ignore[no-untyped-call]
        self.moves_tensors = has_gpu
        self.backend = "nccl" if has_gpu else "gloo"
        self.version = _nccl_version() if has_gpu else torch.__version__.partition("+")[0]
        self._device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        self._config = config

    def to_peer(self, local_host: str) -> GroupSendLane:
        return GroupSendLane(self._side(local_host, slot_shape(self._config.credit_bytes)))

    def from_peer(self, offer: Offer, *, sender_id: str, local_host: str) -> GroupReceiveLane:
        for name, own in (("backend", self.backend), (self.backend, self.version)):
            theirs = text_in(offer, "backend" if name == "backend" else "version")
            if theirs != own:
                raise TransferError(f"{name}: this worker has {own}, {sender_id} has {theirs}")
        nonce = bytes_in(offer, "nonce", num_bytes=_NONCE_BYTES)
        return GroupReceiveLane(self._side(local_host, shape_in(offer)), nonce)

    def _side(self, local_host: str, shape: SlotShape) -> _Side:
        offer = {"backend": self.backend, "version": self.version}
        return _Side(
            backend=self.backend,
            device=self._device,
            local_host=local_host,
            stall_s=self._config.lease_s,
            shape=shape,
            offer={**offer, **shape.offer(), "nonce": secrets.token_hex(_NONCE_BYTES)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """What both ends of a lane are made of."""

    backend: str
    device: torch.device
    local_host: str
    stall_s: float
    shape: SlotShape
    offer: Offer


class _GroupLane:
    """What both ends have in common."""

    def __init__(self, side: _Side) -> None:
        self.shape = side.shape
        self._side = side
        self._slots: Slots = make_slots(empty_rows(side.shape, side.device))
        self._ranks: TwoRanks | None = None
        self._is_cut = False

    def _connect(self, keys: KeyExchange, *, rank: int, nonce: bytes) -> None:
        """Make the group; whoever is at its other end must say what the peer said it would."""
        side = self._side
        with self._slots.on_stream():
            self._ranks = TwoRanks(
                side.backend, keys, rank=rank, local_host=side.local_host, stall_s=side.stall_s
            )
            if self._is_cut:
                self._ranks.cut()
            self._ranks.prove(bytes.fromhex(str(side.offer["nonce"])), nonce, side.device)

    @property
    def ranks(self) -> TwoRanks:
        assert self._ranks is not None, "connected before"
        return self._ranks

    def cut(self) -> None:
        self._is_cut = True
        if self._ranks is not None:
            self._ranks.cut()

    def close(self) -> None:
        self._ranks = None
        del self._slots  # whoever still knows of the lane keeps no memory with it


class GroupSendLane(_GroupLane):
    """The sender's end."""

    def __init__(self, side: _Side) -> None:
        super().__init__(side)
        self.offer = side.offer

    def connect(self, answer: Offer, keys: KeyExchange) -> None:
        self._connect(keys, rank=0, nonce=bytes_in(answer, "nonce", num_bytes=_NONCE_BYTES))

    def mark(self, payloads: Sequence[KVPayload]) -> object:
        return self._slots.mark(payloads)

    def stage(self, slot: int, placed: Sequence[Placed]) -> StagedSlot:
        return self._slots.stage_in_place(slot, placed)

    def send(self, slot: int, staged: StagedSlot) -> _GroupMove:
        with self._slots.on_stream():
            works = [self.ranks.send(data) for data in staged.tensors]
        return _GroupMove(self.ranks, works, self._slots)


class GroupReceiveLane(_GroupLane):
    """The receiver's end.

    Args:
        side: Of this rank.
        nonce: What the sender said it would send first.
    """

    def __init__(self, side: _Side, nonce: bytes) -> None:
        super().__init__(side)
        self.answer = side.offer
        self._nonce = nonce

    def connect(self, keys: KeyExchange) -> None:
        self._connect(keys, rank=1, nonce=self._nonce)

    def receive(self, their_slot: int, slot: int, segments: Sequence[Segment]) -> _GroupMove:
        with self._slots.writing(slot):
            works = [self.ranks.receive(self._slots.slot(slot, segment)) for segment in segments]
        return _GroupMove(self.ranks, works, self._slots)

    def payload(self, slot: int, start: int, num_bytes: int) -> KVPayload:
        return self._slots.payload(slot, start, num_bytes)

    def release(self, slot: int) -> None:
        self._slots.release(slot)


class _GroupMove:
    """A slot under way."""

    def __init__(self, ranks: TwoRanks, works: Sequence[dist.Work], slots: Slots) -> None:
        self._ranks = ranks
        self._works = works
        self._slots = slots

    def wait(self) -> None:
        with self._slots.on_stream():
            for work in self._works:
                self._ranks.wait(work)


def _nccl_version() -> str:
    built = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return nccl.loaded_version() or built
