"""What a run came to, whether it can be believed, and everything needed to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.core.config import unbind
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.workload.rate import mean_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One run."""

    config: BenchConfig
    workload: Mapping[str, Any]  # every setting of it
    digest: str  # of the requests that were sent: equal digests are equal requests at equal times
    run_id: str
    model: str
    server_version: str  # as it says; empty: it does not
    prompts_of: str  # what prompts are made of: tokens of the server or of a tokenizer, or words
    machine: Mapping[str, Any]
    num_sent: int
    most_in_flight: int
    num_late: int  # of these, sent later than the config's limit
    first_due_s: float  # when the first request was due
    last_due_s: float
    cpu_s: float  # of this process, from the first request to the last answer
    elapsed_s: float
    is_interrupted: bool
    unread: str  # why the workload could not be read to its end; empty: it was
    num_uncounted: int  # answers whose tokens the server did not count
    num_other_length: int  # answers that are longer or shorter than asked
    first_problem: str  # the first error, with what the server said of it
    summary: Summary

    @property
    def offered_per_s(self) -> float | None:
        """The rate at which requests were due."""
        return mean_rate(self.num_sent, first_s=self.first_due_s, last_s=self.last_due_s)

    @property
    def cpu_share(self) -> float:
        """Of one core, that this process took to send and to measure."""
        return self.cpu_s / self.elapsed_s if self.elapsed_s > 0.0 else 0.0

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this run is no measurement of its workload; empty: it is one.

        A server that refuses everything was measured: none of its answers is a good one.
        """
        found = []
        if self.is_interrupted:
            found.append("it was interrupted")
        if self.unread:
            found.append(self.unread)
        if self.summary.errors["connect"] == self.summary.num_requests:
            found.append("no request reached the server")
        if self.num_late * 100 > self.num_sent:
            found.append(
                f"{self.num_late} of {self.num_sent} requests were sent later than "
                f"{self.config.late_limit_s:g} s, the worst by {self.summary.late_s.percentile(100):.3g} s"
            )
        return tuple(found)

    @property
    def is_valid(self) -> bool:
        return not self.problems

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of the numbers has to know, though they are true."""
        told = []
        if self.num_uncounted:
            told.append(f"{self.num_uncounted} answers without usage: tokens are counted by chunks")
        if self.num_other_length and self.config.ignore_eos:
            told.append(f"{self.num_other_length} answers are not as long as asked")
        return tuple(told)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the requests themselves."""
        return {
            "tool": "twinpool bench",
            "run_id": self.run_id,
            "valid": self.is_valid,
            "problems": list(self.problems),
            "remarks": list(self.remarks),
            "first_error": self.first_problem,
            "machine": dict(self.machine),
            "server": {"url": self.config.url, "model": self.model, "version": self.server_version},
            "config": unbind(self.config),
            "workload": dict(self.workload) | {"digest": self.digest},
            "client": {
                "sent": self.num_sent,
                "late": self.num_late,
                "offered_per_s": self.offered_per_s,
                "most_in_flight": self.most_in_flight,
                "cpu_s": self.cpu_s,
                "cpu_share": self.cpu_share,
                "prompts_of": self.prompts_of,
                "uncounted": self.num_uncounted,
                "other_length": self.num_other_length,
            },
            "summary": self.summary.to_json(),
        }
