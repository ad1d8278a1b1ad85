"""PrefillService: the first token and the KV leave, and however a call ends, the books are clean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.transport import FrameSink
from tests.decode_service.toy_worker import pair
from tests.engine.fake_runner import expected_output
from tests.patience import eventually
from tests.toys import request
from twinpool.core.errors import (
    InvalidRequest,
    PromptTooLong,
    TransferError,
    TransferRefused,
    WorkerDraining,
)
from twinpool.core.request import FinishReason, Request
from twinpool.core.secret import Secret
from twinpool.core.ticket import Endpoint

LONG = tuple(i % 90 for i in range(69))


class StuckTransport:
    """Takes a message and never answers; ``reading`` tells whether somebody still waits in it."""

    moves_tensors = False
    endpoint = Endpoint("loopback", "nowhere")

    def __init__(self) -> None:
        self.reading = 0

    def reaches(self, peer: Endpoint) -> bool:
        return True

    async def start(self, sink: FrameSink) -> None: ...

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> StuckTransport:
        return self

    async def send(self, frames: Sequence[Frame]) -> None:
        self.reading += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # what it reads it reads to the end
            self.reading -= 1

    async def finish(self) -> None:
        raise AssertionError("nothing was sent")

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def abort(self) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 69])
@pytest.mark.parametrize("num_sent", [0, 2])
def test_a_prompt_computed_here_is_continued_there(num_tokens: int, num_sent: int) -> None:
    async def run() -> list[int]:
        async with pair() as (prefill, decode):
            ticket = await decode.decode.reserve(asked, sender_id="prefill")
            first = await prefill.prefill.prefill(asked, ticket)
            got = [first.token_id]
            async with aclosing(decode.decode.resume(ticket, first)) as outputs:
                async for output in outputs:
                    assert output.index == num_sent + len(got)
                    got.append(output.token_id)
            assert output.finish is FinishReason.LENGTH
            assert await prefill.gets_clean()
            assert await decode.gets_clean()
            assert prefill.sender.counters.confirmed == 1
        return got

    asked = replace(request(LONG[:num_tokens], max_tokens=7), output_ids=(5, 6)[:num_sent])
    assert asyncio.run(run()) == expected_output(asked)


def test_without_a_ticket_the_only_token_is_computed_and_nothing_is_kept() -> None:
    async def run() -> None:
        async with pair() as (prefill, _):
            asked = request(LONG, max_tokens=1)
            first = await prefill.prefill.prefill(asked, None)
            assert [first.token_id] == expected_output(asked)
            assert first.finish is FinishReason.LENGTH
            assert await prefill.gets_clean()
            assert prefill.sender.counters.frames == 0

    asyncio.run(run())


@pytest.mark.parametrize(("max_tokens", "output_ids"), [(2, ()), (4, (1, 2))])
def test_without_a_ticket_a_longer_answer_is_refused(max_tokens: int, output_ids: tuple[int, ...]) -> None:
    async def run() -> None:
        async with pair() as (prefill, _):
            asked = replace(request(max_tokens=max_tokens), output_ids=output_ids)
            with pytest.raises(InvalidRequest, match=r"max_tokens: without a ticket .*, not after 2"):
                await prefill.prefill.prefill(asked, None)
            assert prefill.runner.plans == []

    asyncio.run(run())


def test_a_first_token_that_ends_the_answer_ends_the_transfer() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            asked = request(LONG, stop_token_ids=(expected_output(request(LONG))[0],))
            ticket = await decode.decode.reserve(asked, sender_id="prefill")
            first = await prefill.prefill.prefill(asked, ticket)
            assert first.finish is FinishReason.STOP
            assert await prefill.gets_clean()
            await decode.decode.release(ticket)
            assert await decode.gets_clean()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"request_id": "r9"}, "it is for request r9"), ({"num_tokens": 68}, "it is for 68 tokens")],
)
def test_a_ticket_of_another_request_is_refused(change: dict[str, object], problem: str) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            with pytest.raises(InvalidRequest, match=f"ticket: {problem}"):
                await prefill.prefill.prefill(request(LONG), replace(ticket, **change))  # type: ignore[arg-type]
            assert prefill.runner.plans == []
            assert await prefill.is_clean()

    asyncio.run(run())


def test_a_ticket_that_this_worker_cannot_deliver_is_refused_before_any_work() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            elsewhere = replace(ticket, ranks=((Endpoint("pigeon", "loft"),),)).signed(Secret())
            with pytest.raises(TransferError, match="no transport in common"):
                await prefill.prefill.prefill(request(LONG), elsewhere)
            assert prefill.runner.plans == []
            assert await prefill.is_clean()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("asked", "error"),
    [(request(LONG * 2), PromptTooLong), (request((1, 96 + 1)), InvalidRequest)],
)
def test_a_prompt_that_the_engine_refuses_leaves_no_transfer(asked: Request, error: type[Exception]) -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            ticket = replace(
                await decode.decode.reserve(request((1, 2)), sender_id="prefill"),
                request_id=asked.request_id,
                num_tokens=asked.num_tokens,
            ).signed(Secret())
            with pytest.raises(error):
                await prefill.prefill.prefill(asked, ticket)
            assert await prefill.is_clean()

    asyncio.run(run())


def test_a_draining_worker_refuses_and_leaves_no_transfer() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            assert await prefill.control.drain(timeout_s=1.0)
            with pytest.raises(WorkerDraining):
                await prefill.prefill.prefill(request(LONG), ticket)
            assert await prefill.is_clean()

    asyncio.run(run())


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_a_call_cancelled_in_any_step_leaves_clean_books(num_steps: int) -> None:
    """0 is before the first; a prompt of 69 tokens takes nine steps of eight."""

    async def run() -> None:
        async with pair() as (prefill, decode):
            prefill.brake.step_s = 0.02
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            calling = asyncio.ensure_future(prefill.prefill.prefill(request(LONG), ticket))
            await eventually(lambda: len(prefill.runner.plans) >= num_steps)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert await prefill.is_clean()
            assert len(prefill.runner.plans) < 9
            await decode.decode.release(ticket)
            assert await decode.is_clean()

    asyncio.run(run())


def test_a_cancelled_call_returns_only_after_the_transfer_stopped_reading() -> None:
    async def run() -> None:
        stuck = StuckTransport()
        async with pair(transport=stuck) as (prefill, decode):
            prefill.brake.step_s = 0.02
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            calling = asyncio.ensure_future(prefill.prefill.prefill(request(LONG), ticket))
            await eventually(lambda: stuck.reading == 1)
            calling.cancel()
            while stuck.reading:
                await asyncio.sleep(0.001)
                blocks = (await prefill.control.audit()).blocks
                assert not stuck.reading or blocks.owned + blocks.draining == 18
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert await prefill.is_clean()

    asyncio.run(run())


def test_the_blocks_of_a_sent_prompt_stay_until_the_lease_is_over() -> None:
    async def run() -> None:
        stuck = StuckTransport()
        async with pair(TransferConfig(lease_s=0.5, whole_below_tokens=0), transport=stuck) as (
            prefill,
            decode,
        ):
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            first = await prefill.prefill.prefill(request(LONG), ticket)
            assert first.finish is None
            audit = await prefill.control.audit()
            assert (audit.blocks.owned, audit.transfers, audit.sequences) == (18, 1, 1)
            assert await prefill.gets_clean()
            assert stuck.reading == 0
            assert prefill.sender.counters.failed == 1

    asyncio.run(run())


def test_the_blocks_of_a_sent_prompt_do_not_stay_longer_than_the_request_has() -> None:
    async def run() -> None:
        stuck = StuckTransport()
        async with pair(transport=stuck) as (prefill, decode):
            asked = request(LONG, timeout_s=0.5)
            ticket = await decode.decode.reserve(asked, sender_id="prefill")
            await prefill.prefill.prefill(asked, ticket)
            assert await prefill.gets_clean()
            assert await decode.gets_clean()

    asyncio.run(run())


class BrokenTransport(StuckTransport):
    """Takes everything and has a bug at the end."""

    async def send(self, frames: Sequence[Frame]) -> None: ...

    async def finish(self) -> None:
        await asyncio.sleep(0.1)  # until the first token is out
        raise RuntimeError("a bug of the transport")


def test_a_bug_of_a_transport_costs_no_block() -> None:
    async def run() -> None:
        async with pair(transport=BrokenTransport()) as (prefill, decode):
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            first = await prefill.prefill.prefill(request(LONG), ticket)
            assert first.finish is None
            assert await prefill.gets_clean()

    asyncio.run(run())


def test_a_ticket_that_ends_during_the_prompt_ends_the_prompt() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            prefill.brake.step_s = 0.05
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            calling = asyncio.ensure_future(prefill.prefill.prefill(request(LONG), ticket))
            await eventually(lambda: decode.receiver.counters.frames >= 1)
            await decode.decode.release(ticket)
            assert await decode.is_clean()
            with pytest.raises(TransferRefused):
                await calling
            assert await prefill.is_clean()
            assert len(prefill.runner.plans) < 9  # the rest was not computed

    asyncio.run(run())


def test_closing_ends_what_is_still_sent() -> None:
    async def run() -> None:
        stuck = StuckTransport()
        async with pair(transport=stuck) as (prefill, decode):
            ticket = await decode.decode.reserve(request(LONG), sender_id="prefill")
            await prefill.prefill.prefill(request(LONG), ticket)
            await prefill.prefill.close()
            assert stuck.reading == 0
            assert await prefill.is_clean()

    asyncio.run(run())
