"""A prefill worker in a process of its own, to be killed in the middle of a transfer.

Sends to each ticket that it reads from stdin, a part of it only, and prints a line once it has begun.  Its
argument is the transport.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from tests.kv_transfer.workers import LAYOUT, SENDER_ID, start_worker
from tests.patience import PATIENCE_S
from twinpool.core.ticket import KVTicket
from twinpool.pb.types_pb2 import KVTicket as TicketMessage
from twinpool.rpc.codec import ticket_from_pb, ticket_to_pb

NUM_BLOCKS = 512  # of 4 tokens
CONFIG = TransferConfig(whole_below_tokens=0, message_bytes=8192, credit_bytes=4 * 8192)
REPOSITORY = Path(__file__).parents[2]
BLOCKS = tuple(range(NUM_BLOCKS))


class SenderProcess:
    """The process as its peers see it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def send(self, ticket: KVTicket) -> None:
        """Let it send all but the last layer of a sequence; return when it has begun."""
        assert self._process.stdin is not None and self._process.stdout is not None
        message = ticket_to_pb(ticket).SerializeToString().hex()
        self._process.stdin.write(f"{message}\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            assert await self._process.stdout.readline() == b"begun\n"

    async def kill(self) -> None:
        """End it without a word."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def sender_process(transport_name: str) -> AsyncIterator[SenderProcess]:
    """Start one; it is killed when the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        transport_name,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    sender = SenderProcess(process)
    try:
        yield sender
    finally:
        await sender.kill()


async def _main(transport_name: str) -> None:
    worker = await start_worker(transport_name, CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
    while line := await asyncio.to_thread(sys.stdin.readline):
        ticket = ticket_from_pb(TicketMessage.FromString(bytes.fromhex(line)))
        transfer = await worker.sending.begin(ticket, timeout_s=PATIENCE_S)
        for layer in range(LAYOUT.num_layers - 1):
            transfer.written(layer, ticket.num_tokens, BLOCKS)
        print("begun", flush=True)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
