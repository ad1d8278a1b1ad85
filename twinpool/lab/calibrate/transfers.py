"""Measures how long KV of this model takes from worker to worker, over each transport, as `kv-bench` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.core.layout import KVLayout
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.calibrate.steps import Progress
from twinpool.lab.kv_bench.driving import Wanted, measure
from twinpool.lab.kv_bench.local import decode_peer
from twinpool.lab.kv_bench.probe import Probe
from twinpool.lab.kv_bench.report import why_not
from twinpool.lab.kv_bench.source import made_up
from twinpool.lab.kv_bench.talk import connect
from twinpool.lab.profile.profile import Link

_REPEAT = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTiming:
    """One transport and one number of bytes."""

    transport: str
    num_bytes: int
    seconds: float = 0.0  # median
    problem: str = ""  # why there is none


async def measure_transfers(
    config: CalibrateConfig, layout: KVLayout, *, progress: Progress
) -> tuple[TransferTiming, ...]:
    """Move KV of each size over each transport that is wanted; what cannot be measured says why.

    Raises:
        Unavailable: The other process does not start, or ended.
    """
    trust = Trust(party=Party.WORKER)
    timings = []
    for num_tokens in config.transfer_tokens:
        probe = Probe(layout=layout, num_tokens=num_tokens, device=config.device)
        source = made_up(probe)
        wanted = Wanted(transports=config.transports, repeat=_REPEAT)
        async with decode_peer() as (host, port):
            talk = await connect(host, port, trust)
            try:
                rows = await measure(
                    talk,
                    source,
                    wanted,
                    trust=trust,
                    progress=_of_size(num_tokens, progress),
                )
                await talk.call("end")
            finally:
                await talk.close()
        for row in rows:
            measured = {"seconds": row.seconds} if row.is_measured else {"problem": why_not(row)}
            timings.append(TransferTiming(transport=row.transport, num_bytes=row.num_bytes, **measured))
    return tuple(timings)


def _of_size(num_tokens: int, progress: Progress) -> Progress:
    def told(name: str, done: int, total: int) -> None:
        progress(f"transfers: {num_tokens} tokens over {name}", done, total)

    return told


def fit_link(timings: Sequence[TransferTiming]) -> Link:
    """Return the line through the smallest and the largest transfer.

    Args:
        timings: Of one transport, two at least of different sizes.
    """
    small, large = (chosen(timings, key=lambda timing: timing.num_bytes) for chosen in (min, max))
    per_byte_s = (large.seconds - small.seconds) / (large.num_bytes - small.num_bytes)
    if per_byte_s <= 0.0:  # the larger one was no slower: all of it is latency
        return Link(latency_s=0.0, bytes_s=large.num_bytes / large.seconds)
    latency_s = max(0.0, small.seconds - small.num_bytes * per_byte_s)
    return Link(latency_s=latency_s, bytes_s=1.0 / per_byte_s)
