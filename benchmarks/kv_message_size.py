"""How fast KV moves between two workers of one process, by transport, message size and credit.

The defaults of ``TransferConfig`` were chosen with it.  Both ends and both copies share the processor
here, so compare the rows and do not take them for the speed of a network:

    python -m benchmarks.kv_message_size
"""

from __future__ import annotations

import asyncio
import statistics
import time

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.registry import transport_names
from tests.kv_transfer.workers import start_worker
from twinpool.core.layout import KVLayout

LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=64, block_tokens=16, dtype="float32")
NUM_BLOCKS = 64  # 128 MiB of KV
NUM_TRANSFERS = 7
MIB = 2**20


async def _rates(transport_name: str, config: TransferConfig) -> list[float]:
    """Return the bytes per second of each transfer, from the reservation to the confirmation."""
    hub = Hub()
    prefill, decode = [
        await start_worker(transport_name, config, hub=hub, layout=LAYOUT, num_blocks=NUM_BLOCKS, epoch=epoch)
        for epoch in (1, 2)
    ]
    num_tokens, blocks = NUM_BLOCKS * LAYOUT.block_tokens, range(NUM_BLOCKS)
    rates = []
    for _ in range(NUM_TRANSFERS):
        started_s = time.perf_counter()
        ticket = decode.receiver.expect(
            request_id="benchmark", blocks=blocks, num_tokens=num_tokens, timeout_s=60.0
        )
        transfer = prefill.sender.begin(ticket, timeout_s=60.0)
        for layer in range(LAYOUT.num_layers):
            transfer.written(layer, num_tokens, blocks)
        await transfer.wait()
        rates.append(num_tokens * LAYOUT.token_bytes / (time.perf_counter() - started_s))
        decode.receiver.cancel(ticket.transfer_id)
    await prefill.close()
    await decode.close()
    return rates


def main() -> None:
    """Print one row per setting."""
    print("transport  message MiB  credit MiB  median GB/s  best GB/s")
    for name in transport_names():
        for credit_mib in (8, 16, 32):
            for message_mib in (0.25, 0.5, 1, 2, 4, 6):
                config = TransferConfig(message_bytes=int(message_mib * MIB), credit_bytes=credit_mib * MIB)
                rates = asyncio.run(_rates(name, config))
                median, best = statistics.median(rates) / 1e9, max(rates) / 1e9
                print(f"{name:9}  {message_mib:11}  {credit_mib:10}  {median:11.2f}  {best:9.2f}")


if __name__ == "__main__":
    main()
