"""A connection of the TCP transport: what its receiving end makes of a peer that is gone."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.tcp_line.byte_stream import ByteStream
from kv_transfer.tcp_line.incoming import Incoming
from tests.kv_transfer.workers import expect, hello_of, start_worker
from twinpool.core.errors import TransferError


def test_a_sender_that_leaves_before_its_first_credit_breaks_its_transfer() -> None:
    async def run() -> None:
        decode = await start_worker("loopback", TransferConfig(), hub=Hub())
        ticket = await expect(decode, blocks=[3], num_tokens=4)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.close()  # so the credit cannot be written

        stream = ByteStream(ours)
        await Incoming(decode.receiver, decode.config).take(
            stream, hello_of(ticket), on_admitted=lambda: None
        )

        with pytest.raises(TransferError, match="the sender stopped"):
            await decode.receiving.wait(ticket.transfer_id, ticket.epoch)
        assert decode.receiver.counters.broken == 1
        stream.close()
        await decode.close()

    asyncio.run(asyncio.wait_for(run(), 20))
