"""What was measured of one transport, and what it comes to.  Numbers only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One move of the bytes."""

    seconds: float  # from the first byte on its way until the sender knows that all have arrived
    sender_cpu_s: float  # of the whole process, in that time
    receiver_cpu_s: float
    first_block_s: float | None = None  # until the receiver had written the first message; not of bare links


@dataclass(slots=True, kw_only=True)
class Row:
    """One transport."""

    transport: str
    num_bytes: int  # of one move
    skipped: str = ""  # why it was not measured
    failed: str = ""  # what ended the measurement
    num_frames: int = 0  # of one transfer
    bare_piece_bytes: int | None = None  # with which its bare link was fastest
    ours: list[Sample] = field(default_factory=list)
    bare: list[Sample] = field(default_factory=list)
    unchecked: list[Sample] = field(default_factory=list)  # transfers without checksums

    @property
    def is_measured(self) -> bool:
        return bool(self.ours) and not self.failed

    @property
    def seconds(self) -> float:
        """Median of the transfers: the latency of the last block."""
        return _median(self.ours, lambda sample: sample.seconds)

    @property
    def bare_seconds(self) -> float | None:
        """The same of the bare link."""
        return _median(self.bare, lambda sample: sample.seconds) if self.bare else None

    @property
    def gb_s(self) -> float:
        """Bytes on the wire per second."""
        return self.num_bytes / self.seconds / GB

    @property
    def bare_gb_s(self) -> float | None:
        return None if self.bare_seconds is None else self.num_bytes / self.bare_seconds / GB

    @property
    def ratio(self) -> float | None:
        """How much of the bare link's speed is left."""
        return None if self.bare_seconds is None else self.bare_seconds / self.seconds

    @property
    def first_block_s(self) -> float:
        return _median(self.ours, lambda sample: sample.first_block_s or 0.0)

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor time of both processes."""
        return _cpu_s(self.ours) / self.num_bytes * GB

    @property
    def bare_cpu_s_per_gb(self) -> float | None:
        return _cpu_s(self.bare) / self.num_bytes * GB if self.bare else None

    @property
    def checksum_cost(self) -> float | None:
        """How much longer a transfer takes than without checksums: 0.1 is a tenth."""
        if not self.unchecked:
            return None
        return self.seconds / _median(self.unchecked, lambda sample: sample.seconds) - 1

    def to_json(self) -> dict[str, Any]:
        """Return everything, samples included."""
        told: dict[str, Any] = {
            "transport": self.transport,
            "skipped": self.skipped,
            "failed": self.failed,
            "bytes": self.num_bytes,
        }
        if not self.is_measured:
            return told
        return told | {
            "num_frames": self.num_frames,
            "gb_s": self.gb_s,
            "bare_gb_s": self.bare_gb_s,
            "ratio": self.ratio,
            "bare_piece_bytes": self.bare_piece_bytes,
            "first_block_s": self.first_block_s,
            "last_block_s": self.seconds,
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "bare_cpu_s_per_gb": self.bare_cpu_s_per_gb,
            "checksum_cost": self.checksum_cost,
            "samples": {
                "ours": [asdict(sample) for sample in self.ours],
                "bare": [asdict(sample) for sample in self.bare],
                "unchecked": [asdict(sample) for sample in self.unchecked],
            },
        }


def _cpu_s(samples: Sequence[Sample]) -> float:
    return _median(samples, lambda sample: sample.sender_cpu_s + sample.receiver_cpu_s)


def _median(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(map(value, samples))
