"""A measurement as a whole: what was measured where and when, as JSON and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.core.config import unbind
from twinpool.lab.kv_bench.driving import Wanted
from twinpool.lab.kv_bench.probe import Probe
from twinpool.lab.kv_bench.samples import Row
from twinpool.lab.machine import describe_machine

COLUMNS = (
    "transport",
    "GB/s",
    "bare",
    "ratio",
    "first ms",
    "last ms",
    "CPU s/GB",
    "bare",
    "checksum",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `kv-bench` tells."""

    probe: Probe
    wanted: Wanted
    rows: Sequence[Row]

    def to_json(self) -> dict[str, Any]:
        """Return everything."""
        probe = self.probe
        return {
            "machine": describe_machine(),
            "settings": {
                **unbind(probe),
                "repeat": self.wanted.repeat,
                "link": unbind(self.wanted.shape),
                "wire": probe.wire,
            },
            "kv_bytes": probe.kv_bytes,
            "wire_bytes": probe.wire_bytes,
            "transports": [row.to_json() for row in self.rows],
        }

    def title(self) -> str:
        """Say in one line what was moved."""
        probe, layout = self.probe, self.probe.layout
        ranks = (
            f", {layout.tp_size} to {probe.target_tp} ranks" if layout.tp_size * probe.target_tp > 1 else ""
        )
        blocks = "scattered blocks" if probe.scattered else "neighbouring blocks"
        return (
            f"{probe.wire_bytes:,} bytes ({probe.num_tokens} tokens of {layout.num_layers} layers x "
            f"{layout.num_kv_heads} KV heads x {layout.head_dim}, {probe.wire}) in {blocks} of "
            f"{layout.block_tokens} tokens{ranks}; medians of {self.wanted.repeat}"
        )


def cells(row: Row) -> list[str]:
    """Return a measured row as text, in the order of ``COLUMNS``."""
    return [
        row.transport,
        f"{row.gb_s:.2f}",
        _or_dash(row.bare_gb_s, "{:.2f}"),
        _or_dash(row.ratio, "{:.2f}"),
        f"{row.first_block_s * 1e3:.2f}",
        f"{row.seconds * 1e3:.2f}",
        f"{row.cpu_s_per_gb:.2f}",
        _or_dash(row.bare_cpu_s_per_gb, "{:.2f}"),
        _or_dash(row.checksum_cost, "{:+.0%}"),
    ]


def why_not(row: Row) -> str:
    """Say why a row has no numbers."""
    return f"failed: {row.failed}" if row.failed else f"skipped: {row.skipped}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
