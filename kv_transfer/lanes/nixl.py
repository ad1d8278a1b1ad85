"""Lanes over NIXL: the sender stages a slot, and the receiver reads it.

    sender    slots that UCX may read; where they are goes with the offer
    receiver  reads each slot that is announced into one of its own

On one host UCX copies straight from process to process; between hosts it uses RDMA where there is any.
Memory of GPUs is registered in the same way: never run on a GPU so far.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.config import TransferConfig
from kv_transfer.lanes.nixl_agent import NixlAgent, Region, nixl_version
from kv_transfer.lanes.slots import StagedSlot, make_slots
from kv_transfer.pair.greeting import bytes_in, number_in, shape_in, text_in
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import NoMove, Offer, Placed, Segment, SlotShape, end_of, slot_shape
from twinpool.core.errors import TransferDamaged, TransferError, TransferTimeout
from twinpool.core.ports import KVPayload

_NONCE_BYTES = 32
_MOST_ADDRESS = 2**63 - 1
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3  # between two looks at a read


class NixlLanes:
    """Makes the lanes of one rank.

    Args:
        config: Credit and deadlines.
        agent: Of all its senders; closed by its owner.
        net_devices: What the receivers may use of the network, in UCX's words; empty: whatever there is.
    """

    def __init__(self, config: TransferConfig, agent: NixlAgent, *, net_devices: str) -> None:
        # The cache is there before its transports, and one on a GPU has started CUDA in this process; a GPU
        # that the machine has beside a cache in host memory is none of ours.
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.moves_tensors = has_gpu
        self._device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        self._config = config
        self._agent = agent
        self._net_devices = net_devices
        self._version = nixl_version()

    def to_peer(self, local_host: str) -> NixlSendLane:
        shape = slot_shape(self._config.credit_bytes)
        return NixlSendLane(self._agent, shape, self._rows(shape), version=self._version)

    def from_peer(self, offer: Offer, *, sender_id: str, local_host: str) -> NixlReceiveLane:
        for name, own in (("nixl", self._version), ("device", self._device.type)):
            theirs = text_in(offer, name)
            if theirs != own:
                raise TransferError(f"{name}: this worker has {own}, {sender_id} has {theirs}")
        shape = shape_in(offer, own=slot_shape(self._config.credit_bytes))
        return NixlReceiveLane(
            offer, shape, self._rows(shape), net_devices=self._net_devices, stall_s=self._config.lease_s
        )

    def _rows(self, shape: SlotShape) -> Tensor:
        return torch.empty((shape.num_slots, shape.slot_bytes), dtype=torch.uint8, device=self._device)


class NixlSendLane:
    """The sender's end: memory to read from.

    Args:
        agent: Of this transport.
        shape: Of the slots.
        rows: The slots.
        version: Of NIXL.
    """

    def __init__(self, agent: NixlAgent, shape: SlotShape, rows: Tensor, *, version: str) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        rows[0, :_NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8)
        self._agent = agent
        self._slots = make_slots(rows)
        self._region = agent.register(rows)
        self.shape = shape
        self.offer: Offer = {
            "nixl": version,
            "device": rows.device.type,
            **shape.offer(),
            "introduction": base64.b64encode(self._region.introduction).decode(),
            "address": self._region.address,
            "nonce": nonce.hex(),
        }

    def connect(self, answer: Offer, keys: KeyExchange) -> None:
        """Do nothing: it is the receiver who must find this end."""

    def mark(self, payloads: Sequence[KVPayload]) -> object:
        return self._slots.mark(payloads)

    def stage(self, slot: int, placed: Sequence[Placed]) -> StagedSlot:
        return self._slots.stage(slot, placed)

    def send(self, slot: int, staged: StagedSlot) -> NoMove:
        return NoMove()  # it waits to be read

    def cut(self) -> None:
        """Do nothing: no call of this end waits for the peer."""

    def close(self) -> None:
        self._agent.forget(self._region)


class NixlReceiveLane:
    """The receiver's end: reads, and knows when that is done.

    It has a UCX of its own, since UCX never gives up a connection, and one that failed fails for all.

    Args:
        offer: Of the sender.
        shape: Of its slots, and of ours.
        rows: Slots, as many and as large as the sender's.
        net_devices: See ``NixlLanes``.
        stall_s: A read that takes longer has failed.

    Raises:
        TransferDamaged: The offer does not say what it must.
    """

    def __init__(
        self, offer: Offer, shape: SlotShape, rows: Tensor, *, net_devices: str, stall_s: float
    ) -> None:
        self._introduction = _introduction_in(offer)
        self._their_address = number_in(offer, "address", most=_MOST_ADDRESS)
        self._nonce = bytes_in(offer, "nonce", num_bytes=_NONCE_BYTES)
        self._net_devices = net_devices
        self._stall_s = stall_s
        self._rows = rows
        self._slots = make_slots(rows)
        self._reader: _Reader | None = None
        self._is_cut = False
        self.shape = shape
        self.answer: Offer = {}

    def connect(self, keys: KeyExchange) -> None:
        agent = NixlAgent(net_devices=self._net_devices)
        self._reader = reader = _Reader(agent, agent.register(self._rows))
        reader.peer = agent.meet(self._introduction)
        self._read(0, 0, _NONCE_BYTES).wait()
        if bytes(self._slots.slot(0, Segment(0, _NONCE_BYTES)).cpu().numpy()) != self._nonce:
            raise TransferError("somebody else than the peer is at the other end")

    def receive(self, their_slot: int, slot: int, segments: Sequence[Segment]) -> _Reading:
        with self._slots.writing(slot):
            self._slots.begun()()  # nobody reads the slot any more: UCX knows no streams
        return self._read(their_slot, slot, end_of(segments))

    def payload(self, slot: int, start: int, num_bytes: int) -> KVPayload:
        return self._slots.payload(slot, start, num_bytes)

    def release(self, slot: int) -> None:
        self._slots.release(slot)

    def cut(self) -> None:
        self._is_cut = True

    def close(self) -> None:
        if self._reader is not None:
            self._reader.agent.close()
            self._reader = None

    def wait_for(self, read: int) -> None:
        """Block until a read is done; it is of no more use after the return.

        Raises:
            TransferError: It failed, or the lane was cut.
        """
        assert self._reader is not None, "connected before"
        agent = self._reader.agent
        end_s, pause_s = time.monotonic() + self._stall_s, _SHORTEST_PAUSE_S
        while not agent.is_done(read):
            if self._is_cut:
                raise TransferError("the way to the peer was cut")
            if time.monotonic() > end_s:
                raise TransferTimeout(f"staged bytes could not be read in {self._stall_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        agent.end(read)

    def _read(self, their_slot: int, slot: int, num_bytes: int) -> _Reading:
        assert self._reader is not None, "connected before"
        size = self.shape.slot_bytes
        address = self._their_address + their_slot * size
        read = self._reader.agent.read(
            self._reader.peer, address, self._reader.region, slot * size, num_bytes
        )
        return _Reading(self, read)


@dataclass(slots=True, eq=False)
class _Reader:
    """What reads, once there is something to be read."""

    agent: NixlAgent
    region: Region
    peer: str = ""


class _Reading:
    """A slot that is being read."""

    def __init__(self, lane: NixlReceiveLane, read: int) -> None:
        self._lane = lane
        self._read = read

    def wait(self) -> None:
        self._lane.wait_for(self._read)


def _introduction_in(offer: Offer) -> bytes:
    try:
        return base64.b64decode(text_in(offer, "introduction"), validate=True)
    except ValueError:
        raise TransferDamaged("introduction: the peer says none") from None
