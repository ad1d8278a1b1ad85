"""Whole workers as transfers see them, and the small steps that tests take with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hub import Hub
from kv_transfer.outgoing import OutgoingTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.registry import load_transport
from kv_transfer.sender import KVSender
from kv_transfer.transport import Channel, Transport
from tests.kv_transfer.numpy_store import NumpyStore
from tests.patience import PATIENCE_S
from tests.toys import layout
from twinpool.core.clock import Clock, SystemClock
from twinpool.core.layout import KVLayout
from twinpool.core.ticket import KVTicket

LAYOUT = layout(num_layers=3, block_tokens=4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Worker:
    """A store, a transport, and both ends of transfers over it."""

    store: NumpyStore
    transport: Transport
    receiver: KVReceiver
    sender: KVSender
    config: TransferConfig
    hub: Hub

    async def close(self) -> None:
        await self.sender.close()
        await self.transport.close()


async def start_worker(
    transport_name: str,
    config: TransferConfig,
    *,
    hub: Hub,
    layout: KVLayout = LAYOUT,
    num_blocks: int = 32,
    epoch: int = 1,
    clock: Clock | None = None,
) -> Worker:
    """Start a worker with a random store."""
    clock = SystemClock() if clock is None else clock
    store = NumpyStore(layout, num_blocks).fill(seed=epoch)
    transport = load_transport(transport_name, config, hub)
    receiver = KVReceiver(
        store, clock, worker_id="decode", epoch=epoch, endpoints=[transport.endpoint], config=config
    )
    await transport.start(receiver)
    sender = KVSender(store, [transport], SystemClock(), config)
    return Worker(store=store, transport=transport, receiver=receiver, sender=sender, config=config, hub=hub)


@asynccontextmanager
async def two_workers(
    transport_name: str,
    config: TransferConfig,
    *,
    source_layout: KVLayout = LAYOUT,
    target_layout: KVLayout = LAYOUT,
    clock: Clock | None = None,
) -> AsyncIterator[tuple[Worker, Worker]]:
    """Start a prefill and a decode worker; both are closed however the block ends.

    Args:
        clock: Of the decode worker's leases.
    """
    hub = Hub()
    prefill = await start_worker(transport_name, config, hub=hub, layout=source_layout, epoch=10)
    decode = await start_worker(transport_name, config, hub=hub, layout=target_layout, epoch=11, clock=clock)
    try:
        yield prefill, decode
    finally:
        await prefill.close()
        await decode.close()


def expect(worker: Worker, *, blocks: Sequence[int], num_tokens: int, cached_tokens: int = 0) -> KVTicket:
    """Expect a transfer that may take as long as it likes."""
    return worker.receiver.expect(
        request_id="r0", blocks=blocks, num_tokens=num_tokens, cached_tokens=cached_tokens, timeout_s=1e6
    )


def write_all(transfer: OutgoingTransfer, ticket: KVTicket, blocks: Sequence[int]) -> None:
    """Say that all layers are computed."""
    for layer in range(LAYOUT.num_layers):
        transfer.written(layer, ticket.num_tokens, blocks)


def frames_of(
    store: NumpyStore, ticket: KVTicket, blocks: Sequence[int], *, frame_tokens: int
) -> list[Frame]:
    """Cut a sequence into true frames, in order."""
    frames = []
    for layer in range(store.layout.num_layers):
        for first_token in range(ticket.cached_tokens, ticket.num_tokens, frame_tokens):
            num_tokens = min(frame_tokens, ticket.num_tokens - first_token)
            payload = store.read(layer=layer, blocks=blocks, first_token=first_token, num_tokens=num_tokens)
            frames.append(sealed(ticket, layer, first_token, num_tokens, payload))
    return frames


def sealed(ticket: KVTicket, layer: int, first_token: int, num_tokens: int, payload: memoryview) -> Frame:
    """Make a frame with its true checksum."""
    fields = {
        "transfer_id": ticket.transfer_id,
        "epoch": ticket.epoch,
        "layer": layer,
        "first_token": first_token,
        "num_tokens": num_tokens,
        "payload": payload,
    }
    return Frame(**fields, checksum=Frame(**fields, checksum=0).true_checksum())


async def open_channel(worker: Worker, ticket: KVTicket) -> Channel:
    """Open a raw channel, to send frames that no honest sender would."""
    return await worker.transport.open(
        ticket.endpoints[0], transfer_id=ticket.transfer_id, epoch=ticket.epoch, timeout_s=PATIENCE_S
    )
