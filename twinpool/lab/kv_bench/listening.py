"""The decode peer of a measurement: does what the prefill peer asks for, receives KV, and tells its times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kv_transfer.ends import RankIdentity
from kv_transfer.group import ReceiverGroup
from twinpool.core.clock import SystemClock
from twinpool.core.config import bind
from twinpool.core.doors import check_door
from twinpool.core.errors import ConfigError, ServingError, TransferError, Unavailable
from twinpool.core.security import Trust
from twinpool.core.tasks import OwnedTasks
from twinpool.engine.kv_cache import KVCache
from twinpool.lab.kv_bench import ranks
from twinpool.lab.kv_bench.bare.link import LinkSize, Receiving, bare_link
from twinpool.lab.kv_bench.probe import Probe
from twinpool.lab.kv_bench.talk import MAX_LINE_BYTES, Talk, error_answer, welcome
from twinpool.lab.kv_bench.ways import missing_ways
from twinpool.rpc.codec import ticket_to_pb

SENDER_ID = "prefill"
_WORKER_ID = "decode"
_SILENCE_S = 600.0  # longer than anything that the other peer does between two calls

Answer = Mapping[str, Any]


async def listen(
    host: str, port: int, *, trust: Trust, wait_s: float, announce: Callable[[str], None]
) -> None:
    """Wait for one prefill peer, serve it, and return when it has said that this is the end.

    Args:
        host: Where both the peer's calls and the KV arrive.
        port: Of the calls; 0 takes a free one.
        trust: Who may call.
        wait_s: For the peer to come.
        announce: Told the address once there is one.

    Raises:
        ConfigError: The address cannot be listened on, others could reach it, or nobody came.
        Untrusted: Whoever came does not belong here.
        Unavailable: The peer left without a word.
    """
    if host in ("0.0.0.0", "::"):
        raise ConfigError("--listen", f"{host} is no address that the other side reaches")
    check_door("--listen", host, trust)
    reader, writer = await _first_caller(host, port, trust, wait_s, announce)
    talk = Talk(reader, writer)
    try:
        await welcome(talk, writer, trust)
        async with AsyncExitStack() as stack:
            await _Peer(host, trust, stack).serve(talk)
    finally:
        await talk.close()


async def _first_caller(
    host: str, port: int, trust: Trust, wait_s: float, announce: Callable[[str], None]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    came: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.get_running_loop().create_future()
    )

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if came.done():
            writer.close()
        else:
            came.set_result((reader, writer))

    context = None if trust.tls is None else trust.tls.server_context()
    try:
        server = await asyncio.start_server(take, host, port, limit=MAX_LINE_BYTES, ssl=context)
    except OSError as error:
        raise ConfigError("--listen", f"{host}:{port} cannot be listened on: {error}") from None
    try:
        announce(f"{host}:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(wait_s):
            return await came
    except TimeoutError:
        raise ConfigError("--wait", f"nobody has come in {wait_s:g} s") from None
    finally:
        server.close()


class _Peer:
    """Everything between the first call and the last."""

    def __init__(self, host: str, trust: Trust, stack: AsyncExitStack) -> None:
        self._host = host
        self._clock = SystemClock()
        self._identity = RankIdentity(
            worker_id=_WORKER_ID, epoch=time.time_ns() // 1_000_000, secret=trust.secret, tls=trust.tls
        )
        self._measured: _Measured | None = None
        self._ways: dict[tuple[str, bool], _Way] = {}
        self._bare: tuple[Receiving, asyncio.Task[None]] | None = None
        self._running = OwnedTasks()
        self._marked_s = 0.0
        stack.push_async_callback(self._running.close)
        stack.push_async_callback(self._close_ways)
        self._calls: Mapping[str, Callable[..., Awaitable[Answer]]] = {
            "prepare": self._prepare,
            "clock": self._tell_clock,
            "mark": self._mark,
            "used": self._used,
            "open": self._open,
            "close": self._close,
            "expect": self._expect,
            "whole": self._whole,
            "give up": self._give_up,
            "clear": self._clear,
            "digests": self._digests,
            "open bare": self._open_bare,
            "close bare": self._close_bare,
        }

    async def serve(self, talk: Talk) -> None:
        """Answer calls until the peer says that this is the end."""
        while True:
            call = await talk.hear(timeout_s=_SILENCE_S)
            what = call.pop("call", None)
            if what == "end":
                await talk.say({})
                return
            if what not in self._calls:
                raise Unavailable(f"the other side asks for {what!r}, which nobody here does")
            try:
                answer = await self._calls[what](**call)
            except ServingError as error:
                answer = error_answer(error)
            await talk.say(answer)

    @property
    def _now(self) -> _Measured:
        if self._measured is None:
            raise TransferError("nothing was prepared")
        return self._measured

    async def _prepare(self, *, probe: Mapping[str, Any]) -> Answer:
        """Make room for the KV; answer with the transports that do not work here, and why."""
        bound = bind(Probe, probe)
        bound.check_memory()
        caches = ranks.make_caches(bound, bound.target_layout)
        self._measured = _Measured(bound, caches, ranks.blocks_of(bound, seed=bound.seed + 1))
        return {"missing": missing_ways(bound.device)}

    async def _tell_clock(self) -> Answer:
        return {"now_s": self._clock.now_s()}

    async def _mark(self) -> Answer:
        self._marked_s = time.process_time()
        return {}

    async def _used(self) -> Answer:
        """Answer with the processor time since ``mark``."""
        return {"cpu_s": time.process_time() - self._marked_s}

    async def _open(self, *, transport: str, checksum: bool) -> Answer:
        """Open a transport, with checksums or without; answer where each rank is reached."""
        now, config = self._now, self._now.probe.transfer_config(checksum=checksum, host=self._host)
        opened = await ranks.open_ranks(now.caches, self._clock, config, self._identity, transport=transport)
        group = ranks.receiving(opened, now.probe.target_layout, self._identity, lease_s=config.lease_s)
        self._ways[transport, checksum] = _Way(opened, group)
        endpoints = [ends.endpoints[0] for ends in opened.ends]
        return {"addresses": [endpoint.address for endpoint in endpoints]}

    async def _close(self, *, transport: str, checksum: bool) -> Answer:
        await self._ways.pop((transport, checksum)).opened.close()
        return {}

    async def _close_ways(self) -> None:
        while self._ways:
            _, way = self._ways.popitem()
            await way.opened.close()

    async def _expect(self, *, transport: str, checksum: bool) -> Answer:
        """Reserve the blocks for one transfer; answer with its ticket."""
        now = self._now
        started_s = self._clock.now_s()
        ticket = await self._ways[transport, checksum].group.expect(
            request_id="kv-bench",
            sender_id=SENDER_ID,
            blocks=now.blocks,
            num_tokens=now.probe.num_tokens,
            timeout_s=now.probe.timeout_s,
        )
        return {"ticket": ticket_to_pb(ticket).SerializeToString().hex(), "started_s": started_s}

    async def _whole(self, *, transport: str, checksum: bool, transfer_id: str) -> Answer:
        """Answer with what came and when, once all of it has."""
        group = self._ways[transport, checksum].group
        await group.wait(transfer_id, self._identity.epoch)
        report = await group.cancel(transfer_id)
        return {
            "kv_bytes": report.kv_bytes,
            "num_frames": report.num_frames,
            "first_frame_s": report.first_frame_s,
            "complete_s": report.complete_s,
        }

    async def _give_up(self, *, transport: str, checksum: bool, transfer_id: str) -> Answer:
        await self._ways[transport, checksum].group.cancel(transfer_id)
        return {}

    async def _clear(self) -> Answer:
        await asyncio.to_thread(ranks.clear, self._now.caches)
        return {}

    async def _digests(self) -> Answer:
        """Answer with what is in the blocks, by rank and head."""
        now = self._now
        return {
            "digests": await asyncio.to_thread(ranks.digests, now.caches, now.blocks, now.probe.num_tokens)
        }

    async def _open_bare(self, *, transport: str, num_bytes: int, piece_bytes: int) -> Answer:
        link = bare_link(transport)
        if link is None:
            raise TransferError(f"{transport} has no bare link")
        receiving = await link.listen(self._host, LinkSize(num_bytes=num_bytes, piece_bytes=piece_bytes))
        self._bare = (receiving, self._running.start(receiving.run()))
        return {"address": receiving.address}

    async def _close_bare(self) -> Answer:
        """Wait for the end of the bare link; the peer has left it."""
        if self._bare is not None:
            (receiving, running), self._bare = self._bare, None
            try:
                await running
            finally:
                await receiving.close()
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    probe: Probe
    caches: list[KVCache]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    opened: ranks.OpenRanks
    group: ReceiverGroup
