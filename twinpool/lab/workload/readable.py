"""What can be read of a workload whose file breaks off, as a trace of a full disk does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem


class Readable:
    """Ends where a workload cannot be read on, so that what came before it is not lost.

    Attributes:
        problem: Why it cannot be read on; empty: it was read to its end, or as far as somebody asked.
    """

    def __init__(self, workload: Iterable[WorkItem]) -> None:
        self.problem = ""
        self._workload = workload

    def __iter__(self) -> Iterator[WorkItem]:
        """Yield the requests.

        Raises:
            ConfigError: Not even the first one can be read.
        """
        has_any = False
        try:
            for item in self._workload:
                yield item
                has_any = True
        except ConfigError as error:
            if not has_any:
                raise
            self.problem = str(error)
