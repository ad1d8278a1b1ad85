"""One transport as the prefill peer uses it: with checksums or without, over a shaped link or a plain one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from kv_transfer.ends import RankIdentity
from kv_transfer.group import OutgoingTransfer, SenderGroup
from kv_transfer.plan import plan_head_copies
from kv_transfer.rank import RankTransfers
from kv_transfer.sender import KVSender
from twinpool.core.clock import SystemClock
from twinpool.core.errors import TransferDamaged, TransferError
from twinpool.core.ticket import Endpoint, KVTicket
from twinpool.lab.kv_bench import ranks
from twinpool.lab.kv_bench.samples import Sample
from twinpool.lab.kv_bench.source import Source
from twinpool.lab.kv_bench.talk import Talk
from twinpool.lab.kv_bench.watched import WatchedTransport
from twinpool.lab.shaper import LinkShape, ShapedTransport
from twinpool.pb.types_pb2 import KVTicket as TicketMessage
from twinpool.rpc.codec import ticket_from_pb


class SendingWay:
    """All ranks of the prefill peer with one transport open, and the same transport open on the other side.

    Args:
        talk: With the other peer.
        source: What is sent.
        key: Names the way to the other peer: transport and checksum.
        watched: The transport of each rank.
        senders: Of each rank.
        opened: Closed by whoever opened it.
    """

    def __init__(
        self,
        talk: Talk,
        source: Source,
        key: dict[str, Any],
        *,
        watched: Sequence[WatchedTransport],
        senders: Sequence[KVSender],
        opened: ranks.OpenRanks,
    ) -> None:
        self._talk = talk
        self._source = source
        self._key = key
        self._watched = watched
        self._clock = SystemClock()
        self._others = [
            RankTransfers(sender, ends.receiver)
            for sender, ends in zip(senders[1:], opened.ends[1:], strict=True)
        ]
        self._group = SenderGroup(senders[0], self._others)

    def reaches(self, peers: Sequence[Endpoint]) -> bool:
        """Return whether every rank reaches all of ``peers``."""
        return all(way.reaches(peer) for way in self._watched for peer in peers)

    async def send(self, *, ahead_s: float) -> Sample:
        """Send the KV once.

        Args:
            ahead_s: By how much the other peer's clock is ahead of this one's.

        Raises:
            TransferError: What ended the transfer.
        """
        ticket, opened_s, transfer = await self._begin()
        await self._talk.call("mark")
        cpu_s, started_s = time.process_time(), self._clock.now_s()
        await self._write_and_wait(ticket, transfer)
        seconds, cpu_s = self._clock.now_s() - started_s, time.process_time() - cpu_s
        used = await self._talk.call("used")
        told = await self._talk.call("whole", transfer_id=ticket.transfer_id, **self._key)
        return Sample(
            seconds=seconds,
            sender_cpu_s=cpu_s,
            receiver_cpu_s=used["cpu_s"],
            first_block_s=opened_s + told["first_frame_s"] - ahead_s - started_s,
        )

    async def prove(self) -> int:
        """Send into empty caches, and compare what is in them afterwards; return the number of frames.

        Raises:
            TransferDamaged: It is not what was sent.
            TransferError: What ended the transfer.
        """
        probe, source = self._source.probe, self._source
        await self._talk.call("clear")
        ticket, _, transfer = await self._begin()
        await self._write_and_wait(ticket, transfer)
        told = await self._talk.call("whole", transfer_id=ticket.transfer_id, **self._key)
        if told["kv_bytes"] != probe.wire_bytes:
            raise TransferDamaged(f"{told['kv_bytes']} bytes came, {probe.wire_bytes} were to")
        sent = await asyncio.to_thread(source.digests)
        came = await self._talk.call("digests")
        for rank, found in enumerate(came["digests"]):
            if found != [sent[head] for head in probe.target_layout.rank_heads(rank)]:
                raise TransferDamaged(f"rank {rank} holds other KV than was sent")
        return int(told["num_frames"])

    async def close(self) -> None:
        """Abort what is still being sent."""
        await self._group.close()

    async def _begin(self) -> tuple[KVTicket, float, OutgoingTransfer]:
        """Begin a transfer and return once its channels are open.

        Returns:
            The ticket, when it was given by the other peer's clock, and the transfer.
        """
        answer = await self._talk.call("expect", **self._key)
        ticket = ticket_from_pb(TicketMessage.FromString(bytes.fromhex(answer["ticket"])))
        transfer = await self._group.begin(ticket, timeout_s=self._source.probe.timeout_s)
        opening = asyncio.ensure_future(self._all_opened(ticket))
        failing = asyncio.ensure_future(transfer.wait())
        try:
            await asyncio.wait({opening, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
        finally:
            opening.cancel()
            failing.cancel()
            await asyncio.gather(opening, failing, return_exceptions=True)
        return ticket, float(answer["started_s"]), transfer

    async def _all_opened(self, ticket: KVTicket) -> None:
        for copy in plan_head_copies(self._source.probe.layout, ticket.layout):
            await self._watched[copy.source_rank].opened.acquire()

    async def _write_and_wait(self, ticket: KVTicket, transfer: OutgoingTransfer) -> None:
        blocks = self._source.blocks
        for layer in range(ticket.layout.num_layers):
            transfer.written(layer, ticket.num_tokens, blocks)
            for other in self._others:
                other.written(ticket.request_id, layer, ticket.num_tokens, blocks)
        try:
            await transfer.wait()
        except TransferError:
            await self._talk.call("give up", transfer_id=ticket.transfer_id, **self._key)
            raise


async def open_way(
    stack: AsyncExitStack,
    talk: Talk,
    source: Source,
    identity: RankIdentity,
    shape: LinkShape,
    *,
    transport: str,
    checksum: bool,
) -> tuple[SendingWay, list[Endpoint]]:
    """Open a transport on both sides; ``stack`` closes it.

    Returns:
        The way, and where the other peer's ranks are reached.

    Raises:
        ConfigError: It cannot listen.
    """
    key: dict[str, Any] = {"transport": transport, "checksum": checksum}
    answer = await talk.call("open", **key)
    stack.push_async_callback(talk.call, "close", **key)
    config, clock = source.probe.transfer_config(checksum=checksum, host=""), SystemClock()
    opened = await ranks.open_ranks(source.caches, clock, config, identity, transport=transport)
    stack.push_async_callback(opened.close)
    watched: list[WatchedTransport] = []
    senders: list[KVSender] = []
    for rank, (cache, ends) in enumerate(zip(source.caches, opened.ends, strict=True)):
        plain = ends.transports[0]
        watched.append(WatchedTransport(plain if shape == LinkShape() else ShapedTransport(plain, shape)))
        sender = KVSender(
            cache,
            watched[-1:],
            clock,
            config,
            worker_id=identity.worker_id,
            secret=identity.secret,
            rank=rank,
        )
        senders.append(sender)
    way = SendingWay(talk, source, key, watched=watched, senders=senders, opened=opened)
    stack.push_async_callback(way.close)
    return way, [Endpoint(transport, str(address)) for address in answer["addresses"]]
