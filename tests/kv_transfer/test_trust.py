"""Tickets and hellos: who made them, for whom, for what, and how often they are good."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.hello import Hello
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.workers import (
    LAYOUT,
    SECRET,
    SENDER_ID,
    Worker,
    expect,
    hello_of,
    open_channel,
    two_workers,
    write_all,
)
from tests.patience import PATIENCE_S
from twinpool.core.errors import TransferError, TransferRefused
from twinpool.core.secret import Secret
from twinpool.core.ticket import Endpoint, KVTicket
from twinpool.rpc.codec import ticket_from_pb, ticket_to_pb

TOKENS = 10
BLOCKS = (3, 9, 5)
OTHER = Secret(b"known to another deployment only")

CHANGES: dict[str, object] = {
    "transfer_id": "0" * 32,
    "epoch": 12,
    "request_id": "r1",
    "worker_id": "other",
    "sender_id": "other",
    "ranks": ((Endpoint("loopback", "elsewhere"),),),
    "layout": replace(LAYOUT, block_tokens=5),
    "num_tokens": TOKENS + 1,
    "cached_tokens": 4,
    "lease_s": 31.0,
    "expires_unix_s": 1e12,
    "signature": bytes(32),
}


async def meet(scenario: Callable[[Worker, Worker, KVTicket], object]) -> object:
    async with (
        asyncio.timeout(2 * PATIENCE_S),
        two_workers("loopback", TransferConfig()) as (prefill, decode),
    ):
        ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
        return await scenario(prefill, decode, ticket)  # type: ignore[misc]


def test_every_field_of_a_ticket_is_signed() -> None:
    assert set(CHANGES) == {field.name for field in fields(KVTicket)}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_ticket_with_any_field_changed_is_refused(name: str) -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        assert getattr(ticket, name) != CHANGES[name]
        with pytest.raises(TransferRefused, match="nobody of this deployment made this ticket"):
            await prefill.sending.begin(replace(ticket, **{name: CHANGES[name]}), timeout_s=PATIENCE_S)
        assert prefill.sender.counters.refused_tickets == 1
        assert prefill.sender.num_open == 0

    asyncio.run(meet(scenario))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sender_id": "prefill-7"}, "the ticket is for prefill-7, this is prefill"),
        (
            {"expires_unix_s": 1.0},
            "was over [0-9]+ s ago, 120 are allowed: it is old, or the clocks of the two",
        ),
    ],
)
def test_a_true_ticket_for_another_worker_or_another_time_is_refused(
    change: dict[str, object], message: str
) -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        with pytest.raises(TransferRefused, match=message):
            await prefill.sending.begin(replace(ticket, **change).signed(SECRET), timeout_s=PATIENCE_S)

    asyncio.run(meet(scenario))


def test_workers_whose_clocks_are_a_minute_off_their_routers_on_either_side_understand_each_other() -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        behind = replace(ticket, expires_unix_s=time.time() - 110.0).signed(SECRET)
        transfer = await prefill.sending.begin(behind, timeout_s=PATIENCE_S)
        await transfer.abort()

    asyncio.run(meet(scenario))


def test_a_ticket_of_another_deployment_is_refused() -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        with pytest.raises(TransferRefused, match="nobody of this deployment"):
            await prefill.sending.begin(ticket.signed(OTHER), timeout_s=PATIENCE_S)

    asyncio.run(meet(scenario))


def test_a_whole_number_of_seconds_is_signed_as_it_comes_back_from_the_wire() -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        sent = replace(ticket, lease_s=60, expires_unix_s=4_000_000_000).signed(SECRET)
        assert ticket_from_pb(ticket_to_pb(sent)).is_signed_by(SECRET)

    asyncio.run(meet(scenario))


def test_a_ticket_is_good_once() -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        first = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        with pytest.raises(TransferRefused, match="the ticket was used already"):
            await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)

        write_all(first, ticket, BLOCKS)
        await first.wait()

    asyncio.run(meet(scenario))


def test_no_two_tickets_have_an_id_or_a_signature_in_common() -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        tickets = [await expect(decode, blocks=BLOCKS, num_tokens=TOKENS) for _ in range(100)]
        assert len({ticket.transfer_id for ticket in tickets}) == 100
        assert len({ticket.signature for ticket in tickets}) == 100

    asyncio.run(meet(scenario))


HELLO_CHANGES: dict[str, object] = {
    "sender_id": "decode-7",
    "source_rank": 1,
    "target_rank": 1,
    "first_head": 1,
    "num_heads": 1,
    "wire": "int8",
    "proof": bytes(32),
}


@pytest.mark.parametrize("name", sorted(HELLO_CHANGES))
def test_a_hello_with_any_field_changed_is_refused_and_disturbs_nothing(name: str) -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        forged = replace(hello_of(ticket), **{name: HELLO_CHANGES[name]})
        with pytest.raises(TransferRefused, match="the sender does not hold the ticket"):
            decode.receiver.admit(forged, transport="loopback")
        assert decode.receiver.counters.unproved == 1

        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        write_all(transfer, ticket, BLOCKS)
        await transfer.wait()

    asyncio.run(meet(scenario))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sender_id": "decode-7"}, "decode-7 is not the worker that may send"),
        ({"target_rank": 1}, "rank 1 is meant, this is 0"),
        ({"first_head": 1}, "heads 1 to 2 are not kept here, 0 to 1 are"),
        ({"num_heads": 0}, "heads none are not kept here"),
        ({"num_heads": 2**31}, "are not kept here"),
        ({"wire": "bfloat16"}, "wire format bfloat16 is none of float32"),
        ({"wire": "int8"}, "wire format int8 is none of float32"),
        ({"epoch": 10}, "epoch 10 is over, this is 11"),
        ({"transfer_id": "0" * 32}, "no such transfer is expected"),
    ],
)
def test_a_holder_of_the_ticket_may_bring_only_what_is_expected(
    change: dict[str, object], message: str
) -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        hello = replace(hello_of(ticket), **change).proved(ticket.signature)
        with pytest.raises(TransferRefused, match=message):
            decode.receiver.admit(hello, transport="loopback")

    asyncio.run(meet(scenario))


def test_a_hello_that_was_overheard_is_no_use_a_second_time() -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        channel = await open_channel(prefill, ticket)
        with pytest.raises(TransferRefused, match="a sender of heads 0 to 1 was admitted already"):
            await open_channel(prefill, ticket)
        assert decode.receiver.num_open == 1, "the first sender is not disturbed"

        await channel.abort()
        with pytest.raises(TransferRefused, match="was admitted already"):
            await open_channel(prefill, ticket)

    asyncio.run(meet(scenario))


def test_a_hello_without_the_secret_says_nothing_about_the_key() -> None:
    ticket_key, other_key = bytes(range(32)), bytes(range(1, 33))
    hello = Hello(
        transfer_id="0" * 32,
        epoch=1,
        sender_id=SENDER_ID,
        source_rank=0,
        target_rank=0,
        first_head=0,
        num_heads=2,
        wire="float32",
    ).proved(ticket_key)

    assert hello.is_proved_by(ticket_key)
    assert not hello.is_proved_by(other_key)
    assert ticket_key not in hello.proof


def test_a_worker_that_is_full_of_refusals_still_serves() -> None:
    async def scenario(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        for _ in range(1000):
            with pytest.raises(TransferError):
                decode.receiver.admit(replace(hello_of(ticket), proof=b""), transport="loopback")

        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        write_all(transfer, ticket, BLOCKS)
        await transfer.wait()
        sent = prefill.store.sequence(BLOCKS, num_tokens=TOKENS)
        assert isinstance(decode.store, NumpyStore)
        assert (decode.store.sequence(BLOCKS, num_tokens=TOKENS) == sent).all()

    asyncio.run(meet(scenario))
