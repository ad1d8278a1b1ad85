"""What a simulation found: the summary of its requests, and what each worker did."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from twinpool.lab.metrics.summary import Summary
from twinpool.lab.simulate.worker import SimulatedWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """What one worker did, all its lives together."""

    worker: str
    busy_s: float = 0.0  # in steps
    steps: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    kv_bytes_in: int = 0
    kv_bytes_out: int = 0

    @classmethod
    def of(cls, name: str, worker: SimulatedWorker) -> WorkerUse:
        """Return what one life of a worker did."""
        counters = worker.engine.counters
        return cls(
            worker=name,
            busy_s=worker.busy_s,
            kv_bytes_in=worker.kv_bytes_in,
            kv_bytes_out=worker.kv_bytes_out,
            **{
                key: counters.get(key, 0)
                for key in (
                    "steps",
                    "prefilled_tokens",
                    "decoded_tokens",
                    "prefix_hit_tokens",
                    "preemptions",
                )
            },
        )

    def plus(self, other: WorkerUse) -> WorkerUse:
        """Return what two lives of one worker did."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
            if field.name != "worker"
        }
        return WorkerUse(worker=self.worker, **sums)

    def to_json(self, duration_s: float) -> dict[str, Any]:
        """Return everything as plain values, with the share of the time in which it was busy."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"utilisation": self.busy_s / duration_s if duration_s else 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What became of a workload."""

    summary: Summary
    workers: tuple[WorkerUse, ...]
    simulated_s: float  # until the last request ended

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            **self.summary.to_json(),
            "workers": [use.to_json(self.simulated_s) for use in self.workers],
        }
