"""A plan and what was measured, term by term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twinpool.lab.memory.measuring.settings import Measurement
from twinpool.lab.memory.term import TermName
from twinpool.lab.memory.worker_plan import WorkerPlan

SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTerm:
    """One term, or the sum of all."""

    name: str
    planned_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """How much more was planned than measured, as a share of the measured; below 0: less."""
        if self.planned_bytes == self.measured_bytes:
            return 0.0
        return (self.planned_bytes - self.measured_bytes) / max(1, self.measured_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "term": self.name,
            "planned_bytes": self.planned_bytes,
            "measured_bytes": self.measured_bytes,
            "error": round(self.error, 4),
        }


def compare(plan: WorkerPlan, measured: Measurement) -> tuple[ComparedTerm, ...]:
    """Set each term beside what it took; last the sum beside the peak.

    Buffers of transfers are measured as the memory that the process shares with its peers.  The reserve is
    what the peak has more than all other terms.  A GPU's allocator knows neither of the two, so there they
    are left out, of the sum too.
    """
    of = {term.name: term.num_bytes for term in plan.terms}
    rows = [
        _row(TermName.WEIGHTS, of[TermName.WEIGHTS], measured.weight_bytes),
        _row(TermName.CACHE, of[TermName.CACHE], measured.cache_bytes),
        _row(TermName.ACTIVATIONS, of[TermName.ACTIVATIONS], measured.activation_bytes),
    ]
    if not plan.worker.is_gpu:
        rows.append(_row(TermName.PEERS, of[TermName.STAGING] + of[TermName.PEERS], measured.shared_bytes))
        rest = measured.peak_bytes - sum(row.measured_bytes for row in rows)
        rows.append(_row(TermName.RESERVE, of[TermName.RESERVE], max(0, rest)))
    total = sum(row.planned_bytes for row in rows)
    return (*rows, _row(SUM, total, measured.peak_bytes))


def _row(name: str, planned: int, measured: int) -> ComparedTerm:
    return ComparedTerm(name=str(name), planned_bytes=planned, measured_bytes=measured)
