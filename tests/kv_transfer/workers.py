"""Whole workers as transfers see them, and the small steps that tests take with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.frame import Frame
from kv_transfer.group import Identity, OutgoingTransfer, ReceiverGroup, SenderGroup
from kv_transfer.hello import Hello
from kv_transfer.hub import Hub
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transport import Channel, Transport
from tests.kv_transfer.numpy_store import NumpyStore
from tests.patience import PATIENCE_S
from tests.toys import layout
from twinpool.core.clock import Clock, SystemClock
from twinpool.core.layout import KVLayout
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVRange
from twinpool.core.secret import Secret
from twinpool.core.ticket import KVTicket
from twinpool.core.tls import TLSFiles

LAYOUT = layout(num_layers=3, block_tokens=4)
SECRET = Secret(b"known to every worker of the tests")
SENDER_ID = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Worker:
    """A store, a transport, and both ends of transfers over it."""

    store: NumpyStore
    ends: TransferEnds
    receiving: ReceiverGroup
    sending: SenderGroup
    config: TransferConfig
    hub: Hub

    @property
    def transport(self) -> Transport:
        return self.ends.transports[0]

    @property
    def receiver(self) -> KVReceiver:
        return self.ends.receiver

    @property
    def sender(self) -> KVSender:
        return self.ends.sender

    async def close(self) -> None:
        await self.sending.close()
        await self.ends.close()


async def start_worker(
    transport_name: str,
    config: TransferConfig,
    *,
    hub: Hub,
    layout: KVLayout = LAYOUT,
    num_blocks: int = 32,
    epoch: int = 1,
    clock: Clock | None = None,
    worker_id: str = "decode",
    tls: TLSFiles | None = None,
) -> Worker:
    """Start a worker with a random store; unless told otherwise it streams, however short a prompt is."""
    if config.whole_below_tokens == TransferConfig().whole_below_tokens:
        config = replace(config, whole_below_tokens=0)
    clock = SystemClock() if clock is None else clock
    store = NumpyStore(layout, num_blocks).fill(seed=epoch)
    identity = RankIdentity(worker_id=worker_id, epoch=epoch, secret=SECRET, tls=tls)
    ends = await start_ends(store, clock, config, identity, names=[transport_name], hub=hub)
    return Worker(
        store=store,
        ends=ends,
        receiving=receiving(ends.receiver, layout, ends=ends, worker_id=worker_id),
        sending=SenderGroup(ends.sender),
        config=config,
        hub=hub,
    )


def receiving(
    receiver: KVReceiver,
    layout: KVLayout,
    *,
    ends: TransferEnds | None = None,
    worker_id: str = "decode",
    lease_s: float = 30.0,
) -> ReceiverGroup:
    """Return what gives tickets for ``receiver``."""
    endpoints = () if ends is None else ends.endpoints
    identity = Identity(worker_id=worker_id, epoch=receiver.epoch, layout=layout, ranks=(endpoints,))
    return ReceiverGroup(receiver, identity, secret=SECRET, lease_s=lease_s)


def expected_by(
    receiver: KVReceiver,
    layout: KVLayout,
    *,
    blocks: Sequence[int],
    num_tokens: int,
    cached_tokens: int = 0,
    timeout_s: float,
    lease_s: float = 30.0,
) -> KVTicket:
    """Expect a transfer at a receiver that has no transport; no loop is needed."""
    waiting = receiving(receiver, layout, lease_s=lease_s).expect(
        request_id="r0",
        sender_id=SENDER_ID,
        blocks=blocks,
        num_tokens=num_tokens,
        cached_tokens=cached_tokens,
        timeout_s=timeout_s,
    )
    try:
        waiting.send(None)
    except StopIteration as returned:
        ticket: KVTicket = returned.value
        return ticket
    raise AssertionError("one rank has nobody to wait for")


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
    prefill = await start_worker(
        transport_name, config, hub=hub, layout=source_layout, epoch=10, worker_id=SENDER_ID
    )
    decode = await start_worker(transport_name, config, hub=hub, layout=target_layout, epoch=11, clock=clock)
    try:
        yield prefill, decode
    finally:
        await prefill.close()
        await decode.close()


async def expect(
    worker: Worker, *, blocks: Sequence[int], num_tokens: int, cached_tokens: int = 0
) -> KVTicket:
    """Expect a transfer that may take as long as it likes."""
    return await worker.receiving.expect(
        request_id="r0",
        sender_id=SENDER_ID,
        blocks=blocks,
        num_tokens=num_tokens,
        cached_tokens=cached_tokens,
        timeout_s=1e6,
    )


def write_all(transfer: OutgoingTransfer, ticket: KVTicket, blocks: Sequence[int]) -> None:
    """Say that all layers are computed."""
    for layer in range(LAYOUT.num_layers):
        transfer.written(layer, ticket.num_tokens, blocks)


def hello_of(ticket: KVTicket, *, heads: range | None = None, target_rank: int = 0) -> Hello:
    """Return what the true sender of a ticket says first; of all heads if none are named."""
    heads = range(ticket.layout.num_kv_heads) if heads is None else heads
    return Hello(
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        sender_id=ticket.sender_id,
        source_rank=0,
        target_rank=target_rank,
        first_head=heads.start,
        num_heads=len(heads),
        wire=ticket.layout.dtype,
    ).proved(ticket.signature)


def frames_of(
    store: NumpyStore, ticket: KVTicket, blocks: Sequence[int], *, frame_tokens: int
) -> list[Frame]:
    """Cut a sequence into true frames, in order."""
    frames = []
    for layer in range(store.layout.num_layers):
        for first_token in range(ticket.cached_tokens, ticket.num_tokens, frame_tokens):
            num_tokens = min(frame_tokens, ticket.num_tokens - first_token)
            part = KVRange(
                layer=layer, blocks=blocks, first_token=first_token, num_tokens=num_tokens, heads=store.heads
            )
            payload = store.payload(part, wire=store.layout.dtype).joined()
            frames.append(sealed(ticket, layer, first_token, num_tokens, payload))
    return frames


def sealed(ticket: KVTicket, layer: int, first_token: int, num_tokens: int, payload: memoryview) -> Frame:
    """Make a frame of all heads with its true checksum."""
    return Frame(
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        first_head=0,
        num_heads=ticket.layout.num_kv_heads,
        layer=layer,
        first_token=first_token,
        num_tokens=num_tokens,
        checksum=0,
        payload=HostPayload([payload]),
    ).sealed()


async def open_channel(worker: Worker, ticket: KVTicket) -> Channel:
    """Open a raw channel, to send frames that no honest sender would."""
    return await worker.transport.open(ticket.ranks[0][0], hello_of(ticket), timeout_s=PATIENCE_S)
