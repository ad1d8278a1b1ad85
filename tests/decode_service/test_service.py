"""DecodeService: a ticket ends by resume, release or lease, and its room comes back whichever it is."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from kv_transfer.config import TransferConfig
from tests.decode_service.toy_worker import ToyWorker, pair, toy_worker
from tests.engine.fake_runner import expected_output
from tests.patience import PATIENCE_S, eventually
from tests.toys import request
from twinpool.core.errors import (
    InternalError,
    NoFreeBlocks,
    PromptTooLong,
    ServingError,
    TransferError,
    TransferRefused,
    TransferTimeout,
    WorkerDraining,
)
from twinpool.core.request import FinishReason, Request, TokenOutput
from twinpool.core.ticket import KVTicket, TransferReport

PATIENT = TransferConfig(lease_s=PATIENCE_S, whole_below_tokens=0)
HASTY = TransferConfig(lease_s=0.3, whole_below_tokens=0)
PROMPT = tuple(range(9))


async def resume(worker: ToyWorker, ticket: KVTicket, first: TokenOutput) -> list[int]:
    async with aclosing(worker.decode.resume(ticket, first)) as outputs:
        return [output.token_id async for output in outputs]


async def delivered(prefill: ToyWorker, decode: ToyWorker, asked: Request) -> tuple[KVTicket, TokenOutput]:
    """Reserve, prefill, and wait until the KV is whole."""
    ticket = await decode.decode.reserve(asked, sender_id="prefill")
    first = await prefill.prefill.prefill(asked, ticket)
    await eventually(lambda: decode.receiver.report(ticket.transfer_id).complete_s is not None)
    return ticket, first


def test_a_ticket_names_what_is_awaited_and_the_room_is_taken() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT, worker_id="d7") as worker:
            asked = replace(request(PROMPT), output_ids=(1, 2))
            ticket = await worker.decode.reserve(asked, sender_id="prefill")
            assert (ticket.worker_id, ticket.epoch, ticket.request_id) == ("d7", 1, "r0")
            assert (ticket.num_tokens, ticket.cached_tokens, ticket.lease_s) == (11, 0, PATIENCE_S)
            audit = await worker.control.audit()
            assert (audit.tickets, audit.transfers, audit.sequences) == (1, 1, 1)
            assert audit.blocks.owned == 3

    asyncio.run(run())


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(7, 4), (8, 8), (9, 8)])
def test_a_ticket_says_how_much_is_here_and_all_of_it_needs_no_sender(
    num_tokens: int, num_cached: int
) -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            asked = request(tuple(range(num_tokens)), max_tokens=6)
            async with aclosing(worker.decode.generate(asked)) as outputs:
                whole = [output.token_id async for output in outputs]
            ticket = await worker.decode.reserve(replace(asked, request_id="r1"), sender_id="prefill")
            assert (ticket.num_tokens, ticket.cached_tokens) == (num_tokens, num_cached)
            assert worker.decode.num_transfers == (num_cached < num_tokens)
            if num_cached == num_tokens:
                assert await resume(worker, ticket, TokenOutput(index=0, token_id=whole[0])) == whole[1:]
            report = await worker.decode.release(ticket)
            assert (report.kv_bytes, report.cached_tokens) == (0, num_cached)
            assert await worker.is_clean()

    asyncio.run(run())


def test_release_gives_the_room_back_and_tells_what_became_of_the_ticket() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            asked = request(PROMPT)
            ticket, first = await delivered(prefill, decode, asked)
            await resume(decode, ticket, first)
            report = await decode.decode.release(ticket)
            assert report.kv_bytes == 9 * 2 * 64
            assert report.first_frame_s is not None
            assert report.complete_s is not None
            assert report.resumed_s is not None
            assert report.resumed_s >= report.complete_s >= report.first_frame_s
            assert await decode.is_clean()
            assert await decode.decode.release(ticket) == report

    asyncio.run(run())


def test_release_of_an_unused_ticket_frees_its_room_at_once_and_is_idempotent() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            ticket = await worker.decode.reserve(request(PROMPT), sender_id="prefill")
            for _ in range(3):
                assert await worker.decode.release(ticket) == TransferReport()
                assert await worker.is_clean()

    asyncio.run(run())


def test_releases_at_the_same_time_do_not_disturb_each_other() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            ticket = await worker.decode.reserve(request(PROMPT), sender_id="prefill")
            await asyncio.gather(*(worker.decode.release(ticket) for _ in range(5)))
            assert await worker.is_clean()

    asyncio.run(run())


def test_a_foreign_ticket_is_released_into_an_empty_report_and_touches_nothing() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            ticket = await worker.decode.reserve(request(PROMPT), sender_id="prefill")
            for foreign in (replace(ticket, transfer_id="0" * 32), replace(ticket, epoch=2)):
                assert await worker.decode.release(foreign) == TransferReport()
                with pytest.raises(TransferRefused, match="is not expected here, or is over"):
                    await resume(worker, foreign, TokenOutput(index=0, token_id=1))
            assert (await worker.control.audit()).tickets == 1

    asyncio.run(run())


def test_a_ticket_is_resumed_once() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            asked = request(PROMPT, max_tokens=40)
            decode.brake.step_s = 0.01
            ticket, first = await delivered(prefill, decode, asked)
            running = asyncio.ensure_future(resume(decode, ticket, first))
            await eventually(lambda: decode.decode.num_tickets == 0)
            with pytest.raises(TransferRefused, match="is resumed already"):
                await resume(decode, ticket, first)
            assert [first.token_id, *await running] == expected_output(asked)
            with pytest.raises(TransferRefused, match="is over"):
                await resume(decode, ticket, first)

    asyncio.run(run())


def test_a_released_ticket_is_not_resumed() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            ticket, first = await delivered(prefill, decode, request(PROMPT))
            await decode.decode.release(ticket)
            with pytest.raises(TransferRefused):
                await resume(decode, ticket, first)
            assert await decode.is_clean()

    asyncio.run(run())


@pytest.mark.parametrize("is_delivered", [False, True])
def test_a_lease_that_ends_frees_the_room_without_any_traffic(is_delivered: bool) -> None:
    async def run() -> None:
        async with pair(HASTY) as (prefill, decode):
            asked = request(PROMPT)
            if is_delivered:
                ticket, first = await delivered(prefill, decode, asked)
            else:
                ticket, first = (
                    await decode.decode.reserve(asked, sender_id="prefill"),
                    TokenOutput(index=0, token_id=1),
                )
            assert not await decode.is_clean()
            assert await decode.gets_clean()
            assert decode.receiver.counters.expired == 1
            with pytest.raises(TransferError):
                await resume(decode, ticket, first)

    asyncio.run(run())


def test_who_waits_for_kv_that_never_comes_hears_of_it_when_the_lease_ends() -> None:
    async def run() -> None:
        async with toy_worker(HASTY) as worker:
            ticket = await worker.decode.reserve(request(PROMPT), sender_id="prefill")
            with pytest.raises(TransferTimeout, match=r"no progress for 0\.3 s"):
                await resume(worker, ticket, TokenOutput(index=0, token_id=1))
            assert await worker.is_clean()

    asyncio.run(run())


def test_a_stream_outlives_the_lease_of_its_ticket() -> None:
    async def run() -> None:
        async with pair(HASTY) as (prefill, decode):
            asked = request(PROMPT, max_tokens=20)
            ticket, first = await delivered(prefill, decode, asked)
            decode.brake.step_s = 0.05
            assert [first.token_id, *await resume(decode, ticket, first)] == expected_output(asked)

    asyncio.run(run())


@pytest.mark.parametrize(
    "first",
    [
        TokenOutput(index=1, token_id=1),
        TokenOutput(index=0, token_id=1, finish=FinishReason.STOP),
        TokenOutput(index=0, token_id=97),
    ],
)
def test_a_first_token_that_does_not_fit_is_refused_and_ends_the_ticket(first: TokenOutput) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            ticket, _ = await delivered(prefill, decode, request(PROMPT))
            with pytest.raises(InternalError, match=r"^first: "):
                await resume(decode, ticket, first)
            assert await decode.is_clean()

    asyncio.run(run())


def test_a_consumer_that_leaves_in_mid_stream_frees_everything() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            decode.brake.step_s = 0.01
            ticket, first = await delivered(prefill, decode, request(PROMPT, max_tokens=60))
            async with aclosing(decode.decode.resume(ticket, first)) as outputs:
                await anext(outputs)
            assert await decode.is_clean()

    asyncio.run(run())


@pytest.mark.parametrize("is_delivered", [False, True])
def test_a_resume_that_is_cancelled_frees_everything(is_delivered: bool) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            asked = request(PROMPT, max_tokens=60)
            decode.brake.step_s = 0.01
            if is_delivered:
                ticket, first = await delivered(prefill, decode, asked)
            else:
                ticket, first = (
                    await decode.decode.reserve(asked, sender_id="prefill"),
                    TokenOutput(index=0, token_id=1),
                )
            resuming = asyncio.ensure_future(resume(decode, ticket, first))
            await eventually(lambda: decode.decode.num_tickets == 0)
            await asyncio.sleep(0.05)
            resuming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await resuming
            assert await decode.is_clean()

    asyncio.run(run())


def test_release_ends_a_stream_that_still_runs() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            decode.brake.step_s = 0.01
            ticket, first = await delivered(prefill, decode, request(PROMPT, max_tokens=60))
            async with aclosing(decode.decode.resume(ticket, first)) as outputs:
                await anext(outputs)
                await decode.decode.release(ticket)
                assert await decode.is_clean()
                with pytest.raises(ServingError, match="the sequence was aborted"):
                    async for _ in outputs:
                        pass

    asyncio.run(run())


def test_a_sender_that_gives_up_is_told_to_who_waits() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            prefill.brake.step_s = 0.05
            asked = request(tuple(range(60)))
            ticket = await decode.decode.reserve(asked, sender_id="prefill")
            sending = asyncio.ensure_future(prefill.prefill.prefill(asked, ticket))
            resuming = asyncio.ensure_future(resume(decode, ticket, TokenOutput(index=0, token_id=1)))
            await eventually(lambda: decode.receiver.counters.frames >= 1)
            sending.cancel()
            with pytest.raises(TransferError):
                await resuming
            assert await decode.is_clean()

    asyncio.run(run())


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            await worker.decode.reserve(request(PROMPT * 10), sender_id="prefill")  # 23 of 32 blocks
            before = (await worker.control.audit()).blocks
            with pytest.raises(NoFreeBlocks) as caught:
                await worker.decode.reserve(request(PROMPT * 5), sender_id="prefill")
            assert (caught.value.needed, caught.value.free, caught.value.total) == (12, 9, 32)
            with pytest.raises(PromptTooLong):
                await worker.decode.reserve(request(PROMPT * 15), sender_id="prefill")
            assert (await worker.control.audit()).blocks == before

    asyncio.run(run())


def test_a_reservation_that_is_cancelled_takes_nothing() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            reserving = asyncio.ensure_future(worker.decode.reserve(request(PROMPT), sender_id="prefill"))
            await asyncio.sleep(0)
            reserving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reserving
            assert await worker.gets_clean()

    asyncio.run(run())


def test_a_draining_worker_reserves_nothing_but_ends_what_it_has() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            asked = request(PROMPT, max_tokens=10)
            decode.brake.step_s = 0.01
            ticket, first = await delivered(prefill, decode, asked)
            draining = asyncio.ensure_future(decode.control.drain(timeout_s=PATIENCE_S))
            await eventually(lambda: decode.control.load().draining)
            with pytest.raises(WorkerDraining):
                await decode.decode.reserve(request(request_id="r1"), sender_id="prefill")
            assert not draining.done()
            assert [first.token_id, *await resume(decode, ticket, first)] == expected_output(asked)
            assert await draining is True

    asyncio.run(run())


def test_generate_gives_the_whole_answer_here() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            asked = request(PROMPT, max_tokens=6)
            async with aclosing(worker.decode.generate(asked)) as outputs:
                got = [output async for output in outputs]
            assert [output.token_id for output in got] == expected_output(asked)
            assert [output.index for output in got] == list(range(6))
            assert got[-1].finish is FinishReason.LENGTH
            assert await worker.is_clean()

    asyncio.run(run())


@pytest.mark.parametrize("num_outputs", [0, 1, 5])
def test_a_consumer_of_generate_that_leaves_frees_everything(num_outputs: int) -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            worker.brake.step_s = 0.01
            async with aclosing(worker.decode.generate(request(PROMPT, max_tokens=60))) as outputs:
                for _ in range(num_outputs):
                    await anext(outputs)
            assert await worker.gets_clean()

    asyncio.run(run())


def test_closing_ends_every_reservation() -> None:
    async def run() -> None:
        async with toy_worker(PATIENT) as worker:
            for number in range(3):
                await worker.decode.reserve(request(PROMPT, request_id=f"r{number}"), sender_id="prefill")
            await worker.decode.close()
            assert await worker.is_clean()

    asyncio.run(run())


def test_a_step_that_fails_ends_the_stream_and_the_ticket() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            ticket, first = await delivered(prefill, decode, request(PROMPT, max_tokens=60))
            decode.runner._slots.clear()  # the next step misses its KV
            with pytest.raises(InternalError, match="the step failed: KeyError"):
                await resume(decode, ticket, first)
            assert await decode.is_clean()
            asked = request(PROMPT, request_id="r1")
            ticket, first = await delivered(prefill, decode, asked)
            assert [first.token_id, *await resume(decode, ticket, first)] == expected_output(asked)

    asyncio.run(run())
