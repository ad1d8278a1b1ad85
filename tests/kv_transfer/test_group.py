"""Transfers between workers of several ranks: all ranks or none, whatever ends them and whenever."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.group import OutgoingTransfer
from kv_transfer.hub import Hub
from kv_transfer.rank import RankTransfers
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.ranks import PortOf, RankedWorker, ranked_worker
from tests.kv_transfer.workers import SENDER_ID
from tests.patience import PATIENCE_S, eventually
from tests.toys import layout
from twinpool.core.clock import ManualClock
from twinpool.core.errors import (
    ServingError,
    TransferError,
    TransferRefused,
    TransferTimeout,
    WorkerLost,
)
from twinpool.core.layout import KVLayout
from twinpool.core.rank_port import Expected, RankState
from twinpool.core.ticket import KVTicket, TransferReport

NUM_TOKENS = 22
SOURCE_BLOCKS, TARGET_BLOCKS = (5, 1, 7, 0, 3, 2), (2, 6, 4)
SOURCE_BLOCK_TOKENS, TARGET_BLOCK_TOKENS = 4, 8
LEASE_S = 30.0
# One token of one layer is one message, so that a transfer has many steps.
CONFIG = TransferConfig(whole_below_tokens=0, lease_s=LEASE_S, message_bytes=64, credit_bytes=256)

T = TypeVar("T")
Pair = tuple[RankedWorker[NumpyStore], RankedWorker[NumpyStore]]


def tp_layout(tp_size: int, *, block_tokens: int, num_kv_heads: int = 4) -> KVLayout:
    return layout(num_layers=3, num_kv_heads=num_kv_heads, block_tokens=block_tokens, tp_size=tp_size)


def whole(layout: KVLayout, num_blocks: int, seed: int) -> NumpyStore:
    """The store of the same worker without ranks."""
    return NumpyStore(replace(layout, tp_size=1), num_blocks).fill(seed)


def share(store: NumpyStore, layout: KVLayout, rank: int) -> NumpyStore:
    """A rank's share of ``store``."""
    part = NumpyStore(layout, store.bytes.shape[2], rank=rank)
    part.bytes[:] = store.bytes[:, :, :, :, part.heads.start : part.heads.stop]
    return part


@asynccontextmanager
async def pair(
    source_tp: int,
    target_tp: int,
    *,
    num_kv_heads: int = 4,
    config: TransferConfig = CONFIG,
    clock: ManualClock | None = None,
    source_port: PortOf = lambda rank, transfers: transfers,
    target_port: PortOf = lambda rank, transfers: transfers,
) -> AsyncIterator[Pair]:
    """A prefill worker with random KV and a decode worker with other random bytes; leaves no task behind."""
    before = asyncio.all_tasks()
    source = tp_layout(source_tp, block_tokens=SOURCE_BLOCK_TOKENS, num_kv_heads=num_kv_heads)
    target = tp_layout(target_tp, block_tokens=TARGET_BLOCK_TOKENS, num_kv_heads=num_kv_heads)
    kv, old = whole(source, 8, seed=1), whole(target, 8, seed=2)
    hub = Hub()
    async with (
        ranked_worker(
            source,
            config,
            hub=hub,
            make_store=lambda layout, rank: share(kv, layout, rank),
            worker_id=SENDER_ID,
            port_of=source_port,
        ) as prefill,
        ranked_worker(
            target,
            config,
            hub=hub,
            make_store=lambda layout, rank: share(old, layout, rank),
            worker_id="decode",
            clock=clock,
            port_of=target_port,
        ) as decode,
    ):
        yield prefill, decode
    await eventually(lambda: asyncio.all_tasks() == before)


def arrived(
    prefill: RankedWorker[NumpyStore], decode: RankedWorker[NumpyStore], *, first_token: int = 0
) -> bool:
    """Whether every decode rank holds its heads of what the prefill ranks have computed."""
    sent = {
        head: store.sequence(SOURCE_BLOCKS, first_token=first_token, num_tokens=NUM_TOKENS)[
            :, :, :, head - store.heads.start
        ]
        for store in prefill.stores
        for head in store.heads
    }
    return all(
        np.array_equal(
            store.sequence(TARGET_BLOCKS, first_token=first_token, num_tokens=NUM_TOKENS)[:, :, :, i],
            sent[head],
        )
        for store in decode.stores
        for i, head in enumerate(store.heads)
    )


async def within_patience(work: Awaitable[None]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await work


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "num_kv_heads"),
    [
        (source, target, heads)
        for source, target, heads in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))
        if all(heads % tp == 0 or tp % heads == 0 for tp in (source, target))
    ],
)
def test_each_decode_rank_gets_its_heads_once(source_tp: int, target_tp: int, num_kv_heads: int) -> None:
    async def run() -> None:
        async with pair(source_tp, target_tp, num_kv_heads=num_kv_heads) as (prefill, decode):
            ticket = await decode.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS, cached_tokens=3)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            for num_tokens in (1, 9, NUM_TOKENS):
                prefill.written(transfer, num_tokens, SOURCE_BLOCKS)
                await asyncio.sleep(0)
            decode.receiving.resumed(ticket.transfer_id)

            await within_patience(decode.receiving.wait(ticket.transfer_id, ticket.epoch))
            await within_patience(transfer.wait())

            assert arrived(prefill, decode, first_token=3)
            assert decode.receiving.is_whole(ticket.transfer_id)
            report = await decode.receiving.cancel(ticket.transfer_id)
            kept = sum(len(store.heads) for store in decode.stores)  # by all ranks, shared ones several times
            head_bytes = ticket.layout.token_bytes // num_kv_heads
            assert report.kv_bytes == (NUM_TOKENS - 3) * kept * head_bytes
            assert prefill.counters()["kv_sent_bytes"] == report.kv_bytes
            assert report.transport == "loopback"
            assert report.complete_s is not None and report.first_frame_s is not None
            assert prefill.is_idle and decode.is_idle

    asyncio.run(run())


class BreakablePort:
    """A RankPort that does not answer once it is lost: what it stands for is frozen, or out of reach."""

    def __init__(self, transfers: RankTransfers) -> None:
        self._transfers = transfers
        self.lost = asyncio.Event()

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        await self._answer(self._transfers.expect(expected, epoch=epoch))

    async def received(self, transfer_id: str, *, epoch: int) -> None:
        await self._answer(self._transfers.received(transfer_id, epoch=epoch))

    async def cancel(self, transfer_id: str) -> TransferReport:
        return await self._answer(self._transfers.cancel(transfer_id))

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> None:
        await self._answer(self._transfers.begin(ticket, timeout_s=timeout_s))

    async def sent(self, transfer_id: str) -> None:
        await self._answer(self._transfers.sent(transfer_id))

    async def abort(self, transfer_id: str) -> None:
        await self._answer(self._transfers.abort(transfer_id))

    async def state(self) -> RankState:
        return await self._answer(self._transfers.state())

    async def _answer(self, answer: Coroutine[Any, Any, T]) -> T:
        answering, losing = asyncio.ensure_future(answer), asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({answering, losing}, return_when=asyncio.FIRST_COMPLETED)
            if losing.done():
                raise WorkerLost("w/rank1", "it did not answer")
            return answering.result()
        finally:
            answering.cancel()
            losing.cancel()
            await asyncio.gather(answering, losing, return_exceptions=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A transfer from two ranks to two ranks, at some step of it."""

    prefill: RankedWorker[NumpyStore]
    decode: RankedWorker[NumpyStore]
    ticket: KVTicket
    transfer: OutgoingTransfer
    clock: ManualClock  # of the decode worker
    prefill_port: BreakablePort
    decode_port: BreakablePort

    def write(self, num_tokens: int, *ranks: int) -> None:
        """Compute tokens on some ranks of the prefill worker; on all if none is named."""
        self.prefill.written(self.transfer, num_tokens, SOURCE_BLOCKS, ranks=ranks or (0, 1))

    def has_confirmed(self, rank: int) -> bool:
        """Whether a decode rank is whole and its sender knows it."""
        return self.prefill.ends[rank].sender.counters.confirmed == 1

    async def wait(self) -> None:
        await within_patience(self.decode.receiving.wait(self.ticket.transfer_id, self.ticket.epoch))

    async def cancel(self) -> TransferReport:
        return await self.decode.receiving.cancel(self.ticket.transfer_id)

    def touched(self) -> object:
        """What a read of the prefill worker's caches or a write to the decode worker's would change."""
        reads = [store.num_reads for store in self.prefill.stores]
        return reads, [store.bytes.tobytes() for store in self.decode.stores]


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    clock = ManualClock()
    ports: dict[str, BreakablePort] = {}

    def breakable(name: str) -> PortOf:
        return lambda rank, transfers: ports.setdefault(name, BreakablePort(transfers))

    async with pair(2, 2, clock=clock, source_port=breakable("p"), target_port=breakable("d")) as (p, d):
        ticket = await d.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS)
        transfer = await p.sending.begin(ticket, timeout_s=PATIENCE_S)
        yield Scene(
            prefill=p,
            decode=d,
            ticket=ticket,
            transfer=transfer,
            clock=clock,
            prefill_port=ports["p"],
            decode_port=ports["d"],
        )


async def begun(scene: Scene) -> None:
    await asyncio.sleep(0)


async def streaming(scene: Scene) -> None:
    scene.write(10)
    await eventually(lambda: all(ends.receiver.counters.frames > 2 for ends in scene.decode.ends))


async def whole_on_rank_0(scene: Scene) -> None:
    scene.write(10, 1)
    scene.write(NUM_TOKENS, 0)
    await eventually(lambda: scene.has_confirmed(0))


async def whole_on_rank_1(scene: Scene) -> None:
    scene.write(NUM_TOKENS, 1)
    await eventually(lambda: scene.has_confirmed(1))


async def whole_on_both(scene: Scene) -> None:
    scene.write(NUM_TOKENS)
    await scene.wait()
    await within_patience(scene.transfer.wait())


WHOLE_RANKS = {begun: (), streaming: (), whole_on_rank_0: (0,), whole_on_rank_1: (1,), whole_on_both: (0, 1)}
Act = Callable[[Scene], Awaitable[object]]


async def abort(scene: Scene) -> None:
    await scene.transfer.abort()


async def cancel(scene: Scene) -> None:
    await scene.cancel()


async def leases_run_out(scene: Scene) -> None:
    expired: list[asyncio.Future[TransferReport]] = []
    scene.decode.receiving.call_on_expiry(
        lambda transfer_id: expired.append(asyncio.ensure_future(scene.decode.receiving.cancel(transfer_id)))
    )
    scene.clock.advance(LEASE_S)
    for ends in scene.decode.ends:
        ends.receiver.sweep()
    await asyncio.gather(*expired)
    assert len(expired) == 1


def closing(side: str, rank: int) -> Act:
    async def close(scene: Scene) -> None:
        await getattr(scene, side).ends[rank].transports[0].close()

    close.__name__ = f"transport_of_{side}_rank_{rank}_closes"
    return close


@pytest.mark.parametrize("step", WHOLE_RANKS)
@pytest.mark.parametrize(
    ("end", "rank"),
    [
        (abort, None),
        (cancel, None),
        (leases_run_out, None),
        *((closing(side, rank), rank) for side in ("prefill", "decode") for rank in (0, 1)),
    ],
)
def test_what_ends_it_on_one_rank_ends_it_on_all(step: Act, end: Act, rank: int | None) -> None:
    """``rank``: whose own transfer the end hits; it is safe once that is whole."""

    async def run() -> None:
        async with scene() as it:
            await step(it)

            await end(it)

            whole = WHOLE_RANKS[step]
            if rank in whole or (end is abort and whole == (0, 1)):
                it.write(NUM_TOKENS)
                await it.wait()
                await within_patience(it.transfer.wait())
                assert arrived(it.prefill, it.decode)
            else:
                with pytest.raises(TransferError):
                    await it.wait()
                if whole != (0, 1):
                    with pytest.raises(TransferError):
                        await within_patience(it.transfer.wait())
            await it.cancel()
            await it.transfer.abort()
            touched = it.touched()
            it.write(NUM_TOKENS)
            await asyncio.sleep(0.02)
            assert it.touched() == touched
            assert it.prefill.is_idle and it.decode.is_idle

    asyncio.run(run())


@pytest.mark.parametrize("step", WHOLE_RANKS)
def test_the_loss_of_a_prefill_rank_is_told_and_never_taken_for_an_end(step: Act) -> None:
    async def run() -> None:
        async with scene() as it:
            await step(it)
            await asyncio.sleep(0.01)  # the rank has told what it has sent

            it.prefill_port.lost.set()

            if 1 in WHOLE_RANKS[step]:  # that rank had done its part
                it.write(NUM_TOKENS)
                await within_patience(it.transfer.wait())
                await it.wait()
                assert arrived(it.prefill, it.decode)
            else:
                for _ in range(2):
                    with pytest.raises(WorkerLost):
                        await within_patience(it.transfer.wait())
                    with pytest.raises(WorkerLost):
                        await it.transfer.abort()
                assert it.prefill.sending.num_open == it.prefill.ends[0].sender.num_open == 0
                if step is not whole_on_rank_0:
                    with pytest.raises(TransferError):
                        await it.wait()
            await it.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("step", WHOLE_RANKS)
def test_the_loss_of_a_decode_rank_is_told_and_never_taken_for_an_end(step: Act) -> None:
    async def run() -> None:
        async with scene() as it:
            await step(it)
            await asyncio.sleep(0.01)  # the rank has told what it has

            it.decode_port.lost.set()

            if 1 in WHOLE_RANKS[step]:
                it.write(NUM_TOKENS)
                await it.wait()
                assert arrived(it.prefill, it.decode)
            else:
                with pytest.raises(WorkerLost):
                    await it.wait()
            for _ in range(2):
                with pytest.raises(WorkerLost):
                    await it.cancel()
            assert it.decode.ends[0].receiver.num_open == 0
            with suppress(TransferError):
                await it.transfer.abort()
            assert it.prefill.is_idle

    asyncio.run(run())


def test_a_rank_that_does_not_begin_leaves_nothing_begun() -> None:
    async def run() -> None:
        async with pair(4, 2) as (prefill, decode):
            ticket = await decode.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS)
            await prefill.others[1].begin(ticket, timeout_s=PATIENCE_S)
            await prefill.others[1].abort(ticket.transfer_id)

            with pytest.raises(TransferRefused, match="is over"):
                await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)

            assert prefill.is_idle
            await decode.receiving.cancel(ticket.transfer_id)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["begin", "expect"])
def test_a_lost_rank_lets_nothing_begin(name: str) -> None:
    async def run() -> None:
        async with scene() as it:
            ticket = await it.decode.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS)
            num_open = it.decode.ends[0].receiver.num_open
            it.prefill_port.lost.set()
            it.decode_port.lost.set()

            with pytest.raises(WorkerLost):
                if name == "begin":
                    await it.prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
                else:
                    await it.decode.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS)

            assert it.decode.ends[0].receiver.num_open == num_open
            with suppress(ServingError):
                await it.transfer.wait()
            assert it.prefill.sending.num_open == it.prefill.ends[0].sender.num_open == 0

    asyncio.run(run())


class LatePort(BreakablePort):
    """A RankPort to which ``begin`` and ``expect`` come late: after what is said after them."""

    def __init__(self, transfers: RankTransfers) -> None:
        super().__init__(transfers)
        self.late: list[asyncio.Task[None]] = []
        self.may_come = asyncio.Event()

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> None:
        await self._come_late(super().begin(ticket, timeout_s=timeout_s))

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        await self._come_late(super().expect(expected, epoch=epoch))

    async def _come_late(self, call: Coroutine[Any, Any, None]) -> None:
        async def wait() -> None:
            await self.may_come.wait()
            await call

        self.late.append(asyncio.create_task(wait()))
        await asyncio.shield(self.late[-1])


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_was_ended_is_not_begun_by_an_order_that_comes_late(side: str) -> None:
    async def run() -> None:
        ports: list[LatePort] = []

        def late(rank: int, transfers: RankTransfers) -> LatePort:
            ports.append(LatePort(transfers))
            return ports[-1]

        def prompt(rank: int, transfers: RankTransfers) -> RankTransfers:
            return transfers

        async with pair(
            2,
            2,
            source_port=late if side == "prefill" else prompt,
            target_port=late if side == "decode" else prompt,
        ) as (prefill, decode):
            calling: asyncio.Task[object]
            if side == "decode":
                calling = asyncio.create_task(decode.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS))
            else:
                ticket = await decode.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS)
                calling = asyncio.create_task(prefill.sending.begin(ticket, timeout_s=PATIENCE_S))
            (port,) = ports
            await eventually(lambda: len(port.late) == 1)
            calling.cancel()
            with suppress(asyncio.CancelledError):
                await calling

            port.may_come.set()
            with pytest.raises(TransferRefused, match="is over"):
                await port.late[0]

            assert prefill.is_idle
            if side == "decode":
                assert decode.is_idle
            else:
                await decode.receiving.cancel(ticket.transfer_id)

    asyncio.run(run())


def test_who_stops_waiting_ends_nothing() -> None:
    async def run() -> None:
        async with scene() as it:
            for wait in (it.wait, it.transfer.wait):
                waiting = asyncio.ensure_future(wait())
                await asyncio.sleep(0.01)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

            it.write(NUM_TOKENS)

            for _ in range(2):
                await it.wait()
                await within_patience(it.transfer.wait())
            assert arrived(it.prefill, it.decode)
            assert it.prefill.is_idle
            assert (await it.cancel()).complete_s is not None

    asyncio.run(run())


@pytest.mark.parametrize("step", WHOLE_RANKS)
def test_a_release_is_told_to_who_waits_as_what_it_is(step: Act) -> None:
    async def run() -> None:
        async with scene() as it:
            await step(it)
            waiting = asyncio.ensure_future(it.wait())
            await asyncio.sleep(0.01)

            await it.cancel()

            if step is whole_on_both:
                await waiting
            else:
                with pytest.raises(TransferRefused, match="released"):
                    await waiting
            with pytest.raises(TransferRefused):
                await it.wait()

    asyncio.run(run())


def test_a_rank_that_gets_nothing_ends_the_wait_with_its_lease() -> None:
    async def run() -> None:
        async with scene() as it:
            await whole_on_rank_0(it)
            it.decode.receiving.resumed(it.ticket.transfer_id)
            waiting = asyncio.ensure_future(it.wait())
            await asyncio.sleep(0)
            it.clock.advance(LEASE_S)
            it.decode.ends[0].receiver.sweep()
            assert not it.decode.receiving.is_whole(it.ticket.transfer_id)

            it.decode.ends[1].receiver.sweep()

            with pytest.raises(TransferTimeout, match=f"no progress for {LEASE_S:g} s"):
                await waiting
            report = await it.cancel()
            assert report.complete_s is None
            assert report.first_frame_s == 0.0

    asyncio.run(run())


def test_a_whole_transfer_that_was_asked_for_stays_on_every_rank() -> None:
    async def run() -> None:
        async with scene() as it:
            await whole_on_both(it)
            it.decode.receiving.resumed(it.ticket.transfer_id)
            it.clock.advance(1e6)
            for ends in it.decode.ends:
                ends.receiver.sweep()

            assert [ends.receiver.num_open for ends in it.decode.ends] == [1, 1]
            assert (await it.decode.others[0].state()).num_transfers == 0
            await it.wait()
            await it.cancel()
            assert it.decode.is_idle

    asyncio.run(run())


def test_closing_ends_what_is_sent_on_all_ranks() -> None:
    async def run() -> None:
        async with scene() as it:
            await streaming(it)
            assert (await it.prefill.others[0].state()).num_transfers == 1

            await it.prefill.sending.close()

            assert it.prefill.is_idle
            with pytest.raises(TransferError):
                await it.wait()
            await it.cancel()

    asyncio.run(run())


def test_a_request_that_is_tried_again_under_its_name_sends_to_its_second_ticket() -> None:
    async def run() -> None:
        async with scene() as it:
            await it.cancel()
            second = await it.decode.expect(blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS)
            transfer = await it.prefill.sending.begin(second, timeout_s=PATIENCE_S)
            with pytest.raises(TransferError):
                await within_patience(it.transfer.wait())

            it.prefill.written(transfer, NUM_TOKENS, SOURCE_BLOCKS)

            await within_patience(transfer.wait())
            await within_patience(it.decode.receiving.wait(second.transfer_id, second.epoch))
            assert arrived(it.prefill, it.decode)
            await it.decode.receiving.cancel(second.transfer_id)

    asyncio.run(run())


def test_a_transfer_of_nothing_is_whole_at_once_on_all_ranks() -> None:
    async def run() -> None:
        async with pair(2, 4) as (prefill, decode):
            ticket = await decode.expect(
                blocks=TARGET_BLOCKS, num_tokens=NUM_TOKENS, cached_tokens=NUM_TOKENS
            )
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)

            await within_patience(transfer.wait())
            await within_patience(decode.receiving.wait(ticket.transfer_id, ticket.epoch))

            assert (await decode.receiving.cancel(ticket.transfer_id)).num_frames == 0

    asyncio.run(run())
