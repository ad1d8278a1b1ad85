"""The decode side of the check's transfers: a process of its own with a KV cache on a device.

Its arguments are the transport, the device, the number of transfers and the tokens of each.  Prints its
tickets in one line, and for each transfer a line: the digest of what came, or the error that ended it.
"""

from __future__ import annotations

import asyncio
import sys

import torch
import xxhash

from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.group import Identity, ReceiverGroup
from kv_transfer.hub import Hub
from tests.kv_transfer.workers import SECRET, SENDER_ID
from twinpool.core.clock import SystemClock
from twinpool.core.errors import TransferError
from twinpool.core.layout import KVLayout
from twinpool.engine.kv_cache import KVCache
from twinpool.rpc.codec import ticket_to_pb

LAYOUT = KVLayout(num_layers=8, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
CONFIG = TransferConfig(message_bytes=7 * 2**20, credit_bytes=128 * 2**20)


async def start(name: str, device: str, *, worker_id: str, num_tokens: int) -> tuple[KVCache, TransferEnds]:
    """Start a worker's ends over one transport, with an empty cache for ``num_tokens``."""
    cache = KVCache(LAYOUT, LAYOUT.num_blocks(num_tokens), device)
    identity = RankIdentity(worker_id=worker_id, epoch=1, secret=SECRET)
    return cache, await start_ends(cache, SystemClock(), CONFIG, identity, names=[name], hub=Hub())


def use(device: str) -> None:
    """Make a device the current one of this process."""
    if device != "cpu":
        torch.cuda.set_device(device)


def digest(cache: KVCache) -> str:
    """Return a hash of all bytes of a cache."""
    hasher = xxhash.xxh3_128()
    for layer in range(LAYOUT.num_layers):
        for side in cache.slots(layer):
            hasher.update(side.cpu().contiguous().view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())


async def _main(name: str, device: str, num_transfers: int, num_tokens: int) -> None:
    use(device)
    cache, ends = await start(name, device, worker_id="decode", num_tokens=num_tokens)
    identity = Identity(worker_id="decode", epoch=1, layout=LAYOUT, ranks=(ends.endpoints,))
    receiving = ReceiverGroup(ends.receiver, identity, secret=SECRET, lease_s=CONFIG.lease_s)
    tickets = [
        await receiving.expect(
            request_id="r",
            sender_id=SENDER_ID,
            blocks=range(cache.num_blocks),
            num_tokens=num_tokens,
            timeout_s=300.0,
        )
        for _ in range(num_transfers)
    ]
    print(*(ticket_to_pb(ticket).SerializeToString().hex() for ticket in tickets), flush=True)
    for ticket in tickets:
        try:
            await ends.receiver.wait(ticket.transfer_id, ticket.epoch)
            print(digest(cache), flush=True)
        except TransferError as error:
            print(type(error).__name__, error, flush=True)
    await asyncio.Event().wait()  # to be killed


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
