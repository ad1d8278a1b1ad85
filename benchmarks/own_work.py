"""What a transfer has to do that its bare link leaves out, measured alone: so fast can it be at best.

A bare link moves bytes that lie ready, and nobody looks at them afterwards.  A transfer gathers blocks and
makes checksums at one end, compares checksums and fills blocks at the other.  However well both ends work
beside the link, they share its cores.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_transfer.frame import Frame
from twinpool.core.ports import KVRange
from twinpool.lab.kv_bench.probe import LAYOUTS, Probe
from twinpool.lab.kv_bench.source import made_up

_REPEAT = 9
_TAKES_VIEWS = ("tcp",)  # sends what lies in the cache from there: nothing is gathered
_IN_PLACE = ("shm",)  # what is gathered lies where the other end reads it: the link has no work of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """Seconds of one core for one transfer."""

    gather_s: float
    checksum_s: float  # at each end
    scatter_s: float


def measure(num_bytes: int) -> OwnWork:
    """Measure it for as many bytes of KV, in scattered blocks, one layer after the other."""
    layout = LAYOUTS["8b-bf16"]
    probe = Probe(layout=layout, num_tokens=num_bytes // layout.token_bytes)
    source, target = made_up(probe), made_up(probe)
    parts = [
        KVRange(
            layer=layer, blocks=source.blocks, first_token=0, num_tokens=probe.num_tokens, heads=cache.heads
        )
        for cache in source.caches
        for layer in range(layout.num_layers)
    ]
    (cache,), (other,) = source.caches, target.caches
    rows = np.ones((len(parts), probe.wire_bytes // len(parts)), np.uint8)
    frames = []

    def gather() -> None:
        frames[:] = [
            _frame(part, cache.payload(part, wire=probe.wire)).copied(row.data)
            for part, row in zip(parts, rows, strict=True)
        ]

    def checksum() -> None:
        for frame in frames:
            frame.true_checksum()

    def scatter() -> None:
        for frame, part in zip(frames, parts, strict=True):
            other.write(frame.payload, part, wire=probe.wire)

    return OwnWork(gather_s=_seconds(gather), checksum_s=_seconds(checksum), scatter_s=_seconds(scatter))


def best_ratio(row: Mapping[str, Any], num_bytes: int, work: OwnWork) -> float:
    """Return the ratio to the bare link that a transfer reaches here if no core ever waits.

    Args:
        row: Of a transport, as ``kv-bench`` reports it.
        num_bytes: On the wire.
        work: For as many bytes.
    """
    bare_s = num_bytes / row["bare_gb_s"] / 1e9
    sender_s = work.checksum_s + (0.0 if row["transport"] in _TAKES_VIEWS else work.gather_s)
    receiver_s = work.checksum_s + work.scatter_s
    if row["transport"] in _IN_PLACE:
        return bare_s / max(sender_s, receiver_s)
    cores_s = row["bare_cpu_s_per_gb"] * num_bytes / 1e9 + sender_s + receiver_s
    return bare_s / max(bare_s, cores_s / min(2, os.cpu_count() or 1))


def _frame(part: KVRange, payload: Any) -> Frame:
    return Frame(
        transfer_id="benchmark",
        epoch=1,
        first_head=part.heads.start,
        num_heads=len(part.heads),
        layer=part.layer,
        first_token=part.first_token,
        num_tokens=part.num_tokens,
        checksum=None,
        payload=payload,
    )


def _seconds(work: Callable[[], None]) -> float:
    def once() -> float:
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s

    once()
    return statistics.median(once() for _ in range(_REPEAT))
