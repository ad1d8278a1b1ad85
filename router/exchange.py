"""What one prefill worker has sent to one decode worker, in counts, and by which transport."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from twinpool.core.ticket import TransferReport


@dataclass(slots=True)
class Exchange:
    """The transfers of one pair of workers; lives as long as both of them."""

    last_transport: str = ""  # of the last transfer that brought anything
    transfers: Counter[str] = field(default_factory=Counter)  # that arrived whole, by transport
    failures: Counter[str] = field(default_factory=Counter)  # by the class of the error

    def ended(self, report: TransferReport) -> None:
        """Write a transfer down that is over; one that sent nothing used no transport."""
        if report.transport:
            self.last_transport = report.transport
            self.transfers[report.transport] += report.complete_s is not None

    def failed(self, reason: str) -> None:
        """Write a failure down."""
        self.failures[reason] += 1
