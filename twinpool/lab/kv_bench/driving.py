"""The prefill peer of a measurement: one transport after the other, each beside its bare link.

Transfers, bare moves and transfers without checksums take turns, so that all meet the same noise.  The
channel of a transfer is open before its time begins, as in a worker, which computes the prompt meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from kv_transfer.ends import RankIdentity
from kv_transfer.registry import names_between_processes
from twinpool.core.clock import SystemClock
from twinpool.core.config import unbind
from twinpool.core.errors import ConfigError, TransferError
from twinpool.core.security import Trust
from twinpool.lab.kv_bench.bare_moves import open_best
from twinpool.lab.kv_bench.listening import SENDER_ID
from twinpool.lab.kv_bench.samples import Row
from twinpool.lab.kv_bench.sending import SendingWay, open_way
from twinpool.lab.kv_bench.source import Source
from twinpool.lab.kv_bench.talk import Talk
from twinpool.lab.kv_bench.ways import missing_ways
from twinpool.lab.shaper import LinkShape

_NUM_PINGS = 9

Progress = Callable[[str, int, int], None]
"""``(transport, repeats done, of how many)``; never called while something is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is measured, and how often."""

    transports: Sequence[str] = ()  # none: all that work
    repeat: int
    shape: LinkShape = field(default_factory=LinkShape)

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ConfigError("--repeat", f"{self.repeat} is less than 1")


async def measure(
    talk: Talk, source: Source, wanted: Wanted, *, trust: Trust, progress: Progress
) -> list[Row]:
    """Measure every transport that is wanted; what ends one measurement is in its row.

    Raises:
        ConfigError: The other peer cannot hold the KV.
        Unavailable: It is gone.
    """
    answer = await talk.call("prepare", probe=unbind(source.probe))
    missing = {**answer["missing"], **missing_ways(source.probe.device)}
    identity = RankIdentity(
        worker_id=SENDER_ID, epoch=time.time_ns() // 1_000_000, secret=trust.secret, tls=trust.tls
    )
    rows = []
    for name in wanted.transports or names_between_processes():
        row = Row(transport=name, num_bytes=source.probe.wire_bytes, skipped=missing.get(name, ""))
        rows.append(row)
        if row.skipped:
            continue
        progress(name, 0, wanted.repeat)
        try:
            await _fill(row, talk, source, wanted, identity=identity, progress=progress)
        except TransferError as error:
            row.failed = f"{type(error).__name__}: {error}"
    return rows


async def _fill(
    row: Row, talk: Talk, source: Source, wanted: Wanted, *, identity: RankIdentity, progress: Progress
) -> None:
    name, shape = row.transport, wanted.shape
    async with AsyncExitStack() as stack:
        ways: dict[bool, SendingWay] = {}
        for checksum in (True, False):
            way, peers = await open_way(
                stack, talk, source, identity, shape, transport=name, checksum=checksum
            )
            if not way.reaches(peers):
                row.skipped = f"it does not lead to {peers[0].address}"
                return
            ways[checksum] = way
        ahead_s = await _clock_ahead_s(talk)
        row.num_frames = await ways[True].prove()
        await ways[False].send(ahead_s=ahead_s)
        bare = await open_best(stack, talk, name, num_bytes=row.num_bytes, shape=shape)
        row.bare_piece_bytes = None if bare is None else bare.size.piece_bytes
        for number in range(wanted.repeat):
            row.ours.append(await ways[True].send(ahead_s=ahead_s))
            if bare is not None:
                row.bare.append(await bare.move())
            row.unchecked.append(await ways[False].send(ahead_s=ahead_s))
            progress(name, number + 1, wanted.repeat)


async def _clock_ahead_s(talk: Talk) -> float:
    """Return by how much the other peer's clock is ahead: where an answer came quickest, at its middle."""
    clock, answers = SystemClock(), []
    for _ in range(_NUM_PINGS):
        asked_s = clock.now_s()
        there_s = float((await talk.call("clock"))["now_s"])
        answered_s = clock.now_s()
        answers.append((answered_s - asked_s, there_s - (asked_s + answered_s) / 2))
    return min(answers)[1]
