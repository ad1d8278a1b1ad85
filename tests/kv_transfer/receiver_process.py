"""A decode worker in a process of its own, to be killed and frozen.

Expects as many transfers as it is told, prints their tickets in one line, and then for each of them a line:
"whole", or the name of the error that ended it.  Its arguments are the transport, where to listen, its epoch
and the number of transfers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from tests.kv_transfer.workers import LAYOUT, expect, receiving, start_worker
from tests.patience import PATIENCE_S
from twinpool.core.errors import TransferError
from twinpool.core.ticket import KVTicket
from twinpool.pb.types_pb2 import KVTicket as TicketMessage
from twinpool.rpc.codec import ticket_from_pb, ticket_to_pb

NUM_BLOCKS = 512  # of 4 tokens; all of them for each transfer
CONFIG = TransferConfig(lease_s=1.0, message_bytes=8192, credit_bytes=4 * 8192)
REPOSITORY = Path(__file__).parents[2]


class ReceiverProcess:
    """The process as its peers see it."""

    def __init__(self, process: asyncio.subprocess.Process, tickets: list[KVTicket]) -> None:
        self.tickets = tickets
        self._process = process

    @property
    def address(self) -> str:
        return self.tickets[0].ranks[0][0].address

    @property
    def pid(self) -> int:
        return self._process.pid

    async def next_line(self) -> str:
        """Return what became of the next transfer."""
        return await _next_line(self._process)

    def stop(self) -> None:
        """Freeze it."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it without a word."""
        await _kill(self._process)


@asynccontextmanager
async def receiver_process(
    transport_name: str,
    *,
    listen: str = "",
    epoch: int = 1,
    num_transfers: int = 1,
    module: str = __name__,
) -> AsyncIterator[ReceiverProcess]:
    """Start one; it is killed when the block ends.  ``module`` runs: this one, or one that ends in it."""
    arguments = (transport_name, listen, str(epoch), str(num_transfers))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        tickets = [
            ticket_from_pb(TicketMessage.FromString(bytes.fromhex(ticket)))
            for ticket in (await _next_line(process)).split()
        ]
        yield ReceiverProcess(process, tickets)
    finally:
        await _kill(process)


async def _next_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return (await process.stdout.readline()).decode().strip()


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _main(transport_name: str, listen: str, epoch: int, num_transfers: int) -> None:
    config = dataclasses.replace(CONFIG, listen=listen, lease_s=60.0)
    worker = await start_worker(transport_name, config, hub=Hub(), num_blocks=NUM_BLOCKS, epoch=epoch)
    worker = dataclasses.replace(
        worker, receiving=receiving(worker.receiver, LAYOUT, ends=worker.ends, lease_s=CONFIG.lease_s)
    )
    tickets = [
        await expect(worker, blocks=range(NUM_BLOCKS), num_tokens=4 * NUM_BLOCKS)
        for _ in range(num_transfers)
    ]
    print(*(ticket_to_pb(ticket).SerializeToString().hex() for ticket in tickets), flush=True)
    for ticket in tickets:
        try:
            await worker.receiver.wait(ticket.transfer_id, ticket.epoch)
            print("whole", flush=True)
        except TransferError as error:
            print(type(error).__name__, flush=True)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
