"""A decode worker in a process of its own, to be killed and frozen.

Expects as many transfers as it is told, prints their tickets as one line of JSON, and then for each of
them a line: "whole", or the name of the error that ended it.  Its arguments are where to listen, its
epoch and the number of transfers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from tests.kv_transfer.workers import expect, start_worker
from twinpool.core.errors import TransferError
from twinpool.core.ticket import Endpoint, KVTicket

NUM_BLOCKS = 512  # of 4 tokens; all of them for each transfer
CONFIG = TransferConfig(lease_s=1.0, message_bytes=8192, credit_bytes=4 * 8192)


def tickets_from(line: str) -> list[KVTicket]:
    """Read what the process printed."""
    return [
        KVTicket(**{**fields, "endpoints": tuple(Endpoint(**each) for each in fields["endpoints"])})
        for fields in json.loads(line)
    ]


async def _main(listen: str, epoch: int, num_transfers: int) -> None:
    config = dataclasses.replace(CONFIG, listen=listen, lease_s=60.0)
    worker = await start_worker("grpc", config, hub=Hub(), num_blocks=NUM_BLOCKS, epoch=epoch)
    tickets = [
        dataclasses.replace(
            expect(worker, blocks=range(NUM_BLOCKS), num_tokens=4 * NUM_BLOCKS), lease_s=CONFIG.lease_s
        )
        for _ in range(num_transfers)
    ]
    print(json.dumps([dataclasses.asdict(ticket) for ticket in tickets]), flush=True)
    for ticket in tickets:
        try:
            await worker.receiver.wait(ticket.transfer_id, ticket.epoch)
            print("whole", flush=True)
        except TransferError as error:
            print(type(error).__name__, flush=True)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
