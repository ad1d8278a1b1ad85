"""KVReceiver: what it takes, what it refuses, when it gives its room back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.receiver import KVReceiver
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.workers import LAYOUT, SECRET, expected_by, frames_of, hello_of
from tests.patience import eventually
from twinpool.core.clock import ManualClock
from twinpool.core.errors import TransferDamaged, TransferError, TransferRefused, TransferTimeout
from twinpool.core.payload import HostPayload
from twinpool.core.ticket import KVTicket, TransferReport

LEASE_S = 30.0
SOURCE = NumpyStore(LAYOUT, 8).fill(seed=1)
SOURCE_BLOCKS = (5, 1, 7)
BLOCKS = (6, 2, 3)
NUM_TOKENS = 10


class Receiving:
    """A receiver on a manual clock, with one transfer of ten tokens expected."""

    def __init__(self, *, cached_tokens: int = 0, timeout_s: float = 100.0) -> None:
        self.clock = ManualClock()
        self.store = NumpyStore(LAYOUT, 8).fill(seed=2)
        self.before = self.store.bytes.copy()
        self.expired: list[str] = []
        self.receiver = KVReceiver(
            self.store,
            self.clock,
            epoch=3,
            config=TransferConfig(lease_s=LEASE_S),
        )
        self.ticket = expected_by(
            self.receiver,
            LAYOUT,
            lease_s=LEASE_S,
            blocks=BLOCKS,
            num_tokens=NUM_TOKENS,
            cached_tokens=cached_tokens,
            timeout_s=timeout_s,
        )
        self.receiver.on_expired = self.expired.append
        self.hello = hello_of(self.ticket)
        if cached_tokens < NUM_TOKENS:
            self.receiver.admit(self.hello, transport="loopback")
        self.frames = frames_of(SOURCE, self.ticket, SOURCE_BLOCKS, frame_tokens=4)

    @property
    def is_untouched(self) -> bool:
        return bool((self.store.bytes == self.before).all())

    @property
    def is_equal(self) -> bool:
        sent = SOURCE.sequence(SOURCE_BLOCKS, num_tokens=NUM_TOKENS)
        return bool((self.store.sequence(BLOCKS, num_tokens=NUM_TOKENS) == sent).all())

    def accept_all(self) -> None:
        for frame in self.frames:
            self.receiver.accept(frame)


def test_a_ticket_says_where_and_how_much() -> None:
    receiving = Receiving(cached_tokens=4)

    assert receiving.ticket == KVTicket(
        transfer_id=receiving.ticket.transfer_id,
        epoch=3,
        request_id="r0",
        worker_id="decode",
        sender_id="prefill",
        ranks=((),),
        layout=LAYOUT,
        num_tokens=NUM_TOKENS,
        cached_tokens=4,
        lease_s=LEASE_S,
        expires_unix_s=receiving.ticket.expires_unix_s,
        signature=receiving.ticket.signature,
    )
    assert receiving.ticket.is_signed_by(SECRET)
    assert len(bytes.fromhex(receiving.ticket.transfer_id)) == 16


def test_a_whole_transfer_is_reported_with_its_bytes_and_times() -> None:
    receiving = Receiving()
    for frame in receiving.frames:
        receiving.clock.advance(0.5)
        receiving.receiver.accept(frame)
    receiving.clock.advance(2.0)
    receiving.receiver.resumed(receiving.ticket.transfer_id)

    report = receiving.receiver.cancel(receiving.ticket.transfer_id)

    assert receiving.is_equal
    assert report == TransferReport(
        kv_bytes=NUM_TOKENS * LAYOUT.token_bytes,
        num_frames=9,
        cached_tokens=0,
        first_frame_s=0.5,
        complete_s=4.5,
        resumed_s=6.5,
        transport="loopback",
    )
    assert receiving.receiver.cancel(receiving.ticket.transfer_id) == report
    assert receiving.receiver.num_open == 0


def test_an_unknown_transfer_gives_an_empty_report() -> None:
    assert Receiving().receiver.cancel("0" * 32) == TransferReport()


def test_a_transfer_of_nothing_is_whole_at_once() -> None:
    receiving = Receiving(cached_tokens=NUM_TOKENS)

    asyncio.run(receiving.receiver.wait(receiving.ticket.transfer_id, receiving.ticket.epoch))

    assert receiving.receiver.report(receiving.ticket.transfer_id).complete_s == 0.0


def test_repeated_frames_are_counted_and_not_written_again() -> None:
    receiving = Receiving()
    receiving.accept_all()
    receiving.store.bytes[:] = 0

    receiving.accept_all()

    assert receiving.receiver.counters.duplicates == 9
    assert receiving.receiver.counters.frames == 9
    assert not receiving.store.bytes.any()


def test_overlapping_frames_of_other_sizes_complete_the_same_bytes() -> None:
    receiving = Receiving()
    for frame in reversed(frames_of(SOURCE, receiving.ticket, SOURCE_BLOCKS, frame_tokens=3)):
        receiving.receiver.accept(frame)
        receiving.receiver.accept(receiving.frames[0])

    assert receiving.receiver.report(receiving.ticket.transfer_id).complete_s == 0.0
    assert receiving.is_equal


@pytest.mark.parametrize(
    "change",
    [
        {"layer": LAYOUT.num_layers},
        {"layer": -1},
        {"layer": 2**31},
        {"first_token": NUM_TOKENS},
        {"first_token": 3},
        {"first_token": -4},
        {"first_token": 2**31},
        {"num_tokens": 0},
        {"num_tokens": -4},
        {"num_tokens": 3},
        {"num_tokens": 2**31},
        {"payload": HostPayload([memoryview(b"")])},
    ],
    ids=str,
)
def test_a_frame_that_does_not_fit_is_damaged_and_touches_nothing(change: dict[str, object]) -> None:
    receiving = Receiving(cached_tokens=4)
    frame = replace(receiving.frames[0], **change)
    if min(frame.layer, frame.first_token, frame.num_tokens) >= 0:
        frame = frame.sealed()

    with pytest.raises(TransferDamaged, match=r"do not fit into 3 layers of tokens 4 to 10, 64 bytes each"):
        receiving.receiver.accept(frame)

    assert receiving.is_untouched
    assert receiving.receiver.counters.malformed_frames == 1


def test_each_flipped_bit_is_a_checksum_failure_and_touches_nothing() -> None:
    receiving = Receiving()
    frame = receiving.frames[0]
    for bit in range(200):
        payload = bytearray(frame.payload.views()[0])
        payload[bit % len(payload)] ^= 1 << (bit % 8)
        with pytest.raises(TransferDamaged, match="layer 0, token 0: wrong checksum"):
            receiving.receiver.accept(replace(frame, payload=HostPayload([memoryview(payload)])))

    assert receiving.receiver.counters.checksum_failures == 200
    assert receiving.is_untouched


@pytest.mark.parametrize("change", [{"layer": 1}, {"first_token": 4}, {"checksum": 0}], ids=str)
def test_a_frame_that_claims_to_be_another_one_is_a_checksum_failure(change: dict[str, object]) -> None:
    receiving = Receiving()

    with pytest.raises(TransferDamaged, match="wrong checksum"):
        receiving.receiver.accept(replace(receiving.frames[0], **change))

    assert receiving.is_untouched


def test_frames_of_another_life_or_of_an_unknown_transfer_are_refused() -> None:
    receiving = Receiving()
    frame = receiving.frames[0]

    with pytest.raises(TransferRefused, match="epoch 2 is over, this is 3"):
        receiving.receiver.accept(replace(frame, epoch=2))
    with pytest.raises(TransferRefused, match="no such transfer is expected"):
        receiving.receiver.accept(replace(frame, transfer_id="0" * 32))

    assert receiving.is_untouched
    assert receiving.receiver.counters.refused == 2


def test_a_lease_runs_from_the_last_progress_and_ends_once() -> None:
    receiving = Receiving()
    receiving.clock.advance(LEASE_S - 1)
    receiving.receiver.accept(receiving.frames[0])
    receiving.clock.advance(LEASE_S - 1)
    receiving.receiver.accept(receiving.frames[0])  # brings nothing new
    receiving.receiver.sweep()
    assert receiving.expired == []

    receiving.clock.advance(1)
    receiving.receiver.sweep()
    receiving.receiver.sweep()

    assert receiving.expired == [receiving.ticket.transfer_id]
    assert receiving.receiver.num_open == 0
    assert receiving.receiver.counters.expired == 1


def test_the_requests_own_time_ends_a_transfer_that_makes_progress() -> None:
    receiving = Receiving(timeout_s=5.0)
    receiving.clock.advance(4)
    receiving.receiver.accept(receiving.frames[0])
    receiving.clock.advance(1)

    receiving.receiver.sweep()

    assert receiving.expired == [receiving.ticket.transfer_id]


def test_a_late_frame_is_refused_and_counted_even_before_the_sweep_came() -> None:
    receiving = Receiving()
    receiving.clock.advance(LEASE_S)

    for _ in range(2):
        with pytest.raises(TransferRefused, match="no progress for 30 s"):
            receiving.receiver.accept(receiving.frames[0])

    assert receiving.expired == [receiving.ticket.transfer_id]
    assert receiving.receiver.counters.late_frames == 2
    assert receiving.is_untouched


def test_a_whole_transfer_that_nobody_resumes_expires_and_a_resumed_one_does_not() -> None:
    receiving, resumed = Receiving(), Receiving()
    receiving.accept_all()
    resumed.accept_all()
    resumed.receiver.resumed(resumed.ticket.transfer_id)
    for each in (receiving, resumed):
        each.clock.advance(LEASE_S)
        each.receiver.sweep()

    assert receiving.expired == [receiving.ticket.transfer_id]
    assert resumed.expired == []
    assert resumed.receiver.num_open == 1


def test_a_resumed_transfer_that_is_not_whole_expires() -> None:
    receiving = Receiving()
    receiving.receiver.resumed(receiving.ticket.transfer_id)
    receiving.clock.advance(LEASE_S)

    receiving.receiver.sweep()

    assert receiving.expired == [receiving.ticket.transfer_id]


async def _error_of_wait(receiving: Receiving, *, while_waiting: str) -> TransferError:
    waiting = asyncio.create_task(
        receiving.receiver.wait(receiving.ticket.transfer_id, receiving.ticket.epoch)
    )
    await asyncio.sleep(0)
    match while_waiting:
        case "cancel":
            receiving.receiver.cancel(receiving.ticket.transfer_id)
        case "expire":
            receiving.clock.advance(LEASE_S)
            receiving.receiver.sweep()
        case "broken":
            receiving.receiver.broken(receiving.hello, TransferError("the sender is gone"))
        case "whole then cancel":
            receiving.accept_all()
            receiving.receiver.cancel(receiving.ticket.transfer_id)
    with pytest.raises(TransferError) as caught:
        await waiting
    return caught.value


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        ("cancel", TransferRefused, "was released"),
        ("expire", TransferTimeout, "no progress for 30 s"),
        ("broken", TransferError, "the sender is gone"),
        ("whole then cancel", TransferRefused, "was released"),
    ],
)
def test_who_waits_learns_why_it_ended(event: str, kind: type[TransferError], message: str) -> None:
    error = asyncio.run(_error_of_wait(Receiving(), while_waiting=event))

    assert type(error) is kind
    assert message in str(error)


def test_who_comes_after_the_end_learns_why_it_ended() -> None:
    receiving = Receiving()
    receiving.clock.advance(LEASE_S)
    receiving.receiver.sweep()

    with pytest.raises(TransferTimeout, match="no progress for 30 s"):
        asyncio.run(receiving.receiver.wait(receiving.ticket.transfer_id, receiving.ticket.epoch))


def test_a_broken_transfer_takes_no_more_frames_and_keeps_its_room_until_released() -> None:
    receiving = Receiving()
    receiving.receiver.broken(receiving.hello, TransferError("gone"))

    with pytest.raises(TransferRefused, match="the transfer has failed: gone"):
        receiving.receiver.accept(receiving.frames[0])

    assert receiving.is_untouched
    assert receiving.receiver.num_open == 1


def test_a_whole_transfer_cannot_break() -> None:
    receiving = Receiving()
    receiving.accept_all()

    receiving.receiver.broken(receiving.hello, TransferError("gone"))

    asyncio.run(receiving.receiver.wait(receiving.ticket.transfer_id, receiving.ticket.epoch))


def test_nothing_is_written_after_cancel() -> None:
    receiving = Receiving()
    receiving.receiver.cancel(receiving.ticket.transfer_id)

    for frame in receiving.frames:
        with pytest.raises(TransferRefused, match="was released"):
            receiving.receiver.accept(frame)

    assert receiving.is_untouched
    assert receiving.receiver.counters.late_frames == 9


def test_the_loop_sweeps_without_any_traffic() -> None:
    async def scenario() -> list[str]:
        receiving = Receiving()
        sweeping = asyncio.create_task(receiving.receiver.run())
        receiving.clock.advance(LEASE_S)
        await eventually(lambda: bool(receiving.expired))
        sweeping.cancel()
        return receiving.expired

    assert len(asyncio.run(scenario())) == 1
