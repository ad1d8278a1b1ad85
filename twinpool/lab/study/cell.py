"""One cell of a study, and what was measured in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 2  # of everything a study writes; a reader refuses others


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """One arm at one rate, once."""

    arm: str
    rate: float  # requests per second
    repeat: int

    @property
    def name(self) -> str:
        """A name for files: ``1-2_at_2.5_r0``; no two rates have the same."""
        short = f"{self.rate:g}"
        rate = short if float(short) == self.rate else repr(self.rate)
        return f"{self.arm.replace(':', '-')}_at_{rate}_r{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """How one pool spent a cell."""

    workers: int
    busy_share: float | None  # of the time of all its workers, in steps; None: they do not say
    prompt_tokens: int  # computed there
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferUse:
    """The KV that moved, over the requests whose stories are known.

    Time is *hidden* until the first token of the same request has reached the router, which is a little later
    than the end of its prompt; what is left then, the *tail*, is waited for by the second token.
    """

    transfers: int = 0
    kv_bytes: int = 0
    total_s: float = 0.0  # of all transfers, from the first frame to the last
    hidden_s: float = 0.0

    def __add__(self, other: TransferUse) -> TransferUse:
        return TransferUse(
            transfers=self.transfers + other.transfers,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            total_s=self.total_s + other.total_s,
            hidden_s=self.hidden_s + other.hidden_s,
        )

    @property
    def hidden_share(self) -> float | None:
        return self.hidden_s / self.total_s if self.total_s > 0.0 else None

    @property
    def tail_s(self) -> float | None:
        """What was left of one transfer when the first token had reached the router, on average."""
        return (self.total_s - self.hidden_s) / self.transfers if self.transfers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one cell came to; its records and stories lie in files of the cell's name."""

    format: int
    cell: Cell
    taken_at: str  # by the wall clock of the machine that measured, in UTC
    config: Mapping[str, Any]  # resolved: everything that could make arms differ
    problems: tuple[str, ...]  # why nothing may be concluded from it; empty: it counts
    bench: Mapping[str, Any]  # as ``BenchResult.to_json`` says it
    pools: Mapping[str, PoolUse]  # by role
    transfers: TransferUse
    stories: int  # requests whose story the server still knew
    tries: int = 1  # this one included: an invalid measurement is taken again

    @property
    def summary(self) -> Mapping[str, Any]:
        summary: Mapping[str, Any] = self.bench["summary"]
        return summary

    @property
    def good_share(self) -> float:
        """Of the requests that were due, those answered within both limits."""
        return float(self.summary["goodput"]["share"] or 0.0)

    @property
    def answered_share(self) -> float:
        """Of the requests that were due, those answered at all."""
        return float(self.summary["answered"] / self.summary["requests"]) if self.summary["requests"] else 0.0

    @property
    def good_per_s(self) -> float:
        """Requests within the limits per second of sending.

        That is the rate times the share.  By the time until the last answer it would be less where the last
        answers take longer, although all of them are within the limits.
        """
        return self.good_share * self.cell.rate

    def check(self) -> None:
        """Look at all that a report tells of what was read from a file.

        Raises:
            LookupError, AttributeError, TypeError, ValueError: Something is missing, or is no such value.
        """
        machine, server = self.bench["machine"], self.bench["server"]
        _ = machine["processor"], machine["cores"], server["model"]
        latencies = [
            self.latency_s(name, at) for name in ("ttft_s", "tpot_s") for at in ("p50", "p90", "p99")
        ]
        check_numbers(
            self.bench["load_before"],
            self.summary["duration_s"],
            self.good_share,
            self.answered_share,
            *self.summary["errors"].values(),
            *(latency for latency in latencies if latency is not None),
        )

    def latency_s(self, name: str, at: str) -> float | None:
        """Return a percentile, as in ``latency_s("ttft_s", "p50")``; None if nothing was answered."""
        value: float | None = self.summary[name][at]
        return value


def check_numbers(*values: float) -> None:
    """Check what a file says to be numbers.

    Raises:
        TypeError, ValueError: One is none, or is infinite.
    """
    if not math.isfinite(math.fsum(values)):
        raise ValueError("a number is not finite")
