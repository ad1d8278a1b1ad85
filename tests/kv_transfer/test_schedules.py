"""Random schedules against a model: no frame ever changes a block that is not its transfer's own.

The model is told every event and keeps the bytes that each block should hold.  After every event the
store must equal it in every byte, and a transfer must be whole exactly when all its bytes are the
sender's.  ``BLOCKS`` is small, so that freed blocks have a new owner soon, and damaged, repeated, late
and outdated frames keep coming for as long as the schedule runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.receiver import KVReceiver
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.workers import expected_by, frames_of, hello_of, sealed
from tests.toys import layout
from twinpool.core.clock import ManualClock
from twinpool.core.errors import TransferDamaged, TransferError, TransferRefused
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVRange
from twinpool.core.ticket import KVTicket

LAYOUT = layout(num_layers=2, num_kv_heads=1, head_dim=1, block_tokens=2)
NUM_BLOCKS = 6
LEASE_S = 10.0
TIMEOUT_S = 25.0
SOURCES = [NumpyStore(LAYOUT, NUM_BLOCKS).fill(seed) for seed in range(7)]


@dataclass
class Transfer:
    """A transfer as the model knows it; it stays known when it is over, since its frames still come."""

    ticket: KVTicket
    blocks: list[int]
    source: NumpyStore
    frames: list[Frame]
    started_s: float
    progress_s: float
    is_open: bool = True
    is_broken: bool = False
    is_resumed: bool = False
    arrived: set[tuple[int, int]] = field(default_factory=set)  # layer, token

    @property
    def is_whole(self) -> bool:
        missing = self.ticket.num_tokens - self.ticket.cached_tokens
        return len(self.arrived) == LAYOUT.num_layers * missing


class Schedule:
    """A decode worker, its model, and the events that happen to both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.store = NumpyStore(LAYOUT, NUM_BLOCKS).fill(seed=99)
        self.model = NumpyStore(LAYOUT, NUM_BLOCKS).fill(seed=99)
        self.free = list(range(NUM_BLOCKS))
        self.transfers: list[Transfer] = []
        self.epoch = 0
        self.seen: set[str] = set()
        self.restart()

    def run(self, num_events: int) -> None:
        events = (
            [self.expect] * 4
            + [self.frame] * 16
            + [
                self.damaged_frame,
                self.foreign_frame,
                self.outdated_frame,
                self.cancel,
                self.commit,
                self.broken,
            ]
            * 2
            + [self.wait_a_little] * 3
            + [self.sweep, self.restart]
        )
        for _ in range(num_events):
            self.rng.choice(events)()
            self.check()

    def check(self) -> None:
        assert (self.store.bytes == self.model.bytes).all()
        for transfer in self.transfers:
            if transfer.is_open:
                report = self.receiver.report(transfer.ticket.transfer_id)
                assert (report.complete_s is not None) == transfer.is_whole
                assert transfer.is_whole <= self.is_equal(transfer)
        assert self.receiver.num_open == sum(transfer.is_open for transfer in self.transfers)
        owned = [block for transfer in self.transfers if transfer.is_open for block in transfer.blocks]
        assert sorted(owned + self.free) == list(range(NUM_BLOCKS))

    def is_equal(self, transfer: Transfer) -> bool:
        first_token, num_tokens = transfer.ticket.cached_tokens, transfer.ticket.num_tokens
        there, sent = (
            store.sequence(blocks, first_token=first_token, num_tokens=num_tokens)
            for store, blocks in ((self.store, transfer.blocks), (transfer.source, range(NUM_BLOCKS)))
        )
        return bool((there == sent).all())

    def restart(self) -> None:
        """The worker starts a new life with the same memory; all its blocks are free."""
        self.seen.add("restart")
        self.epoch += 1
        for transfer in self.transfers:
            transfer.is_open = False
        self.free = list(range(NUM_BLOCKS))
        self.receiver = KVReceiver(
            self.store,
            self.clock,
            epoch=self.epoch,
            config=TransferConfig(lease_s=LEASE_S),
        )
        self.receiver.on_expired = self.on_expired

    def expect(self) -> None:
        num_blocks = self.rng.randint(1, 3)
        if num_blocks > len(self.free):
            return
        blocks = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(num_blocks)]
        num_tokens = self.rng.randint(2 * num_blocks - 1, 2 * num_blocks)
        cached_tokens = self.rng.choice([0, 0, 0, self.rng.randint(0, num_tokens)])
        ticket = expected_by(
            self.receiver,
            LAYOUT,
            blocks=blocks,
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            timeout_s=TIMEOUT_S,
        )
        if cached_tokens < num_tokens:
            self.receiver.admit(hello_of(ticket), transport="none")
        source = self.rng.choice(SOURCES)
        frames = [
            frame
            for frame_tokens in self.rng.sample(range(1, 5), k=2)
            for frame in frames_of(source, ticket, range(NUM_BLOCKS), frame_tokens=frame_tokens)
        ]
        now_s = self.clock.now_s()
        self.transfers.append(Transfer(ticket, blocks, source, frames, now_s, now_s))

    def frame(self) -> None:
        """A true frame of any transfer there ever was; most are late or repeated, sooner or later."""
        if not self.transfers:
            return
        transfer = self.rng.choice(self.transfers[-4:])
        if not transfer.frames:
            return
        frame = self.rng.choice(transfer.frames)
        tokens = {(frame.layer, token) for token in range(frame.first_token, frame.end_token)}
        if not transfer.is_open or transfer.is_broken or self.is_over(transfer):
            self.seen.add("late frame")
            with pytest.raises(TransferRefused):
                self.receiver.accept(frame)
            return
        self.receiver.accept(frame)
        if tokens <= transfer.arrived:
            self.seen.add("duplicate")
            return
        transfer.arrived |= tokens
        transfer.progress_s = self.clock.now_s()
        part = KVRange(
            layer=frame.layer,
            blocks=transfer.blocks,
            first_token=frame.first_token,
            num_tokens=frame.num_tokens,
            heads=frame.heads,
        )
        self.model.write(frame.payload, part, wire=LAYOUT.dtype)
        if transfer.is_whole:
            self.seen.add("whole")

    def damaged_frame(self) -> None:
        frame = self.any_frame()
        if frame is None:
            return
        self.seen.add("damaged frame")
        payload = bytearray(frame.payload.views()[0])
        payload[self.rng.randrange(len(payload))] ^= 1 << self.rng.randrange(8)
        change = self.rng.choice(
            [
                {"payload": HostPayload([memoryview(payload)])},
                {"layer": frame.layer ^ 1},
                {"first_token": frame.first_token + 1},
                {"first_token": frame.first_token - 1},
                {"num_tokens": frame.num_tokens + 1},
                {"transfer_id": self.rng.choice(self.transfers).ticket.transfer_id, "checksum": 7},
            ]
        )
        with pytest.raises((TransferDamaged, TransferRefused)):
            self.receiver.accept(replace(frame, **change))

    def foreign_frame(self) -> None:
        """A frame with a true checksum for tokens that are not the transfer's to write."""
        transfer = self.any_transfer()
        if transfer is None:
            return
        token = self.rng.choice([transfer.ticket.cached_tokens - 1, transfer.ticket.num_tokens])
        if token >= 0:
            payload = memoryview(bytes(LAYOUT.layer_token_bytes))
            with pytest.raises((TransferDamaged, TransferRefused)):
                self.receiver.accept(sealed(transfer.ticket, 0, token, 1, payload))

    def outdated_frame(self) -> None:
        """A frame that was true in another life of the worker."""
        frame = self.any_frame()
        if frame is not None:
            stale = replace(frame, epoch=self.epoch + self.rng.choice([-1, 1]))
            with pytest.raises(TransferRefused):
                self.receiver.accept(stale.sealed())

    def cancel(self) -> None:
        transfer = self.any_transfer()
        if transfer is not None:
            self.receiver.cancel(transfer.ticket.transfer_id)
            self.give_back(transfer)

    def commit(self) -> None:
        """The tokens are asked for; a whole transfer then belongs to the request until it is cancelled."""
        transfer = self.any_transfer()
        if transfer is not None:
            self.receiver.resumed(transfer.ticket.transfer_id)
            transfer.is_resumed |= transfer.is_open
            if transfer.is_open and transfer.is_whole:
                self.seen.add("commit")

    def broken(self) -> None:
        transfer = self.any_transfer()
        if transfer is not None:
            self.receiver.broken(hello_of(transfer.ticket), TransferError("gone"))
            transfer.is_broken |= transfer.is_open and not transfer.is_whole

    def wait_a_little(self) -> None:
        self.clock.advance(self.rng.choice([0.5, 3.0, LEASE_S]))

    def sweep(self) -> None:
        self.receiver.sweep()
        assert not any(transfer.is_open and self.is_over(transfer) for transfer in self.transfers)

    def is_over(self, transfer: Transfer) -> bool:
        if transfer.is_whole and transfer.is_resumed:
            return False
        now_s = self.clock.now_s()
        return now_s >= transfer.started_s + TIMEOUT_S or now_s >= transfer.progress_s + LEASE_S

    def on_expired(self, transfer_id: str) -> None:
        self.seen.add("expired")
        (transfer,) = (each for each in self.transfers if each.ticket.transfer_id == transfer_id)
        assert transfer.is_open, "a transfer expires once"
        assert self.is_over(transfer)
        self.give_back(transfer)

    def give_back(self, transfer: Transfer) -> None:
        if transfer.is_open:
            transfer.is_open = False
            self.free += transfer.blocks

    def any_transfer(self) -> Transfer | None:
        return self.rng.choice(self.transfers[-4:]) if self.transfers else None

    def any_frame(self) -> Frame | None:
        transfer = self.any_transfer()
        return self.rng.choice(transfer.frames) if transfer is not None and transfer.frames else None


def test_no_schedule_changes_a_block_of_another_owner_or_calls_wrong_bytes_whole() -> None:
    seen: set[str] = set()

    for seed in range(10_000):
        schedule = Schedule(seed)
        schedule.run(num_events=24)
        seen |= schedule.seen

    assert seen == {"whole", "commit", "duplicate", "late frame", "damaged frame", "expired", "restart"}
