"""A study as two tables of texts: requests by rate and arm, and pools by rate and arm.

Both normalisations are there: requests within the limits by all workers, tokens by the workers of each pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from twinpool.lab.study.cell import Measurement, TransferUse
from twinpool.lab.study.findings.words import percent
from twinpool.lab.study.results import GOODPUT, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts; the first two columns say of what, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def requests_table(results: Results) -> Table:
    """Return goodput and latencies of every arm at every rate."""
    rows = []
    for rate in results.rates:
        for arm in results.arms:
            cells = results.cells(arm, rate)
            if not cells:
                continue
            good = [cell.good_per_s for cell in cells]
            rows.append(
                (
                    f"{rate:g}",
                    arm,
                    f"{len(cells)}",
                    percent(fmean(cell.good_share for cell in cells)),
                    f"{fmean(good):.2f}",
                    f"{min(good):.2f} to {max(good):.2f}",
                    f"{fmean(good) / results.settings.workers:.2f}",
                    _ms(cells, "ttft_s", "p50"),
                    _ms(cells, "ttft_s", "p99"),
                    _ms(cells, "tpot_s", "p50"),
                    _ms(cells, "tpot_s", "p99"),
                    f"{sum(sum(cell.summary['errors'].values()) for cell in cells)}",
                    _verdict(results, arm, rate),
                )
            )
    return Table(
        title="Requests",
        columns=(
            "rate, req/s",
            "arm",
            "repeats",
            "within limits",
            "the same, req/s",
            "least to most",
            "per worker, req/s",
            "TTFT p50, ms",
            "TTFT p99, ms",
            "TPOT p50, ms",
            "TPOT p99, ms",
            "errors",
            f"against {results.reference}",
        ),
        rows=tuple(rows),
    )


def pools_table(results: Results) -> Table:
    """Return what each pool did, per worker of that pool."""
    rows = []
    for rate in results.rates:
        for arm in results.arms:
            cells = results.cells(arm, rate)
            for role in {role: None for cell in cells for role in cell.pools}:
                there = [cell for cell in cells if role in cell.pools]
                uses = [cell.pools[role] for cell in there]
                busy = [use.busy_share for use in uses if use.busy_share is not None]
                worker_s = [cell.pools[role].workers * float(cell.summary["duration_s"]) for cell in there]
                moves = role == "prefill"
                hidden_share = sum((cell.transfers for cell in there), TransferUse()).hidden_share
                rows.append(
                    (
                        f"{rate:g}",
                        arm,
                        role,
                        f"{uses[0].workers}",
                        percent(fmean(busy)) if busy else "-",
                        f"{sum(use.prompt_tokens for use in uses) / sum(worker_s):.0f}",
                        f"{sum(use.output_tokens for use in uses) / sum(worker_s):.1f}",
                        f"{fmean(cell.transfers.kv_bytes for cell in there) / 2**20:.1f}" if moves else "-",
                        percent(hidden_share) if moves and hidden_share is not None else "-",
                    )
                )
    return Table(
        title="Pools",
        columns=(
            "rate, req/s",
            "arm",
            "pool",
            "workers",
            "busy",
            "prompt tokens/s per worker",
            "output tokens/s per worker",
            "KV sent, MiB per cell",
            "of its time before the first token",
        ),
        rows=tuple(rows),
    )


def _ms(cells: Sequence[Measurement], name: str, at: str) -> str:
    values = [value for cell in cells if (value := cell.latency_s(name, at)) is not None]
    return f"{fmean(values) * 1000:,.0f}" if values else "-"


def _verdict(results: Results, arm: str, rate: float) -> str:
    if arm == results.reference:
        return ""
    comparison = results.comparison(GOODPUT, arm, rate)
    if comparison is None or not comparison.is_known:
        return "too few repeats"
    if not comparison.differs:
        return "no difference"
    return "only here" if comparison.change is None else f"{comparison.change * 100:+.0f} %"
