"""Requests as they came somewhere, read from a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.arrivals import read_arrivals
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.traces.azure import HEADER, read_azure
from twinpool.lab.workload.traces.lines import read_lines
from twinpool.lab.workload.traces.mooncake import read_mooncake
from twinpool.lab.workload.traces.own import read_own

READERS: Mapping[str, Callable[[Path], Iterator[WorkItem]]] = MappingProxyType(
    {"azure": read_azure, "mooncake": read_mooncake, "own": read_own}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Ends with its file."""

    path: Path
    format: str = "auto"  # azure, mooncake, own; auto looks at the first line
    arrival: str = ""  # empty: the times of the file; else drawn, as ``arrivals.read_arrivals`` reads it
    seed: int = 0  # of drawn times

    def __post_init__(self) -> None:
        if self.format != "auto" and self.format not in READERS:
            raise ConfigError("workload.format", f"{self.format} is none of auto, {', '.join(READERS)}")
        if self.arrival:
            read_arrivals(self.arrival, "workload.arrival")

    @property
    def ends(self) -> bool:
        return True

    @property
    def is_drawn(self) -> bool:
        return False

    def items(self) -> Iterator[WorkItem]:
        """Yield the requests as the file is read.

        Raises:
            ConfigError: The file cannot be read, or a line of it; times that go back are such a line.
        """
        items = READERS[self._format()](self.path)
        if not self.arrival:
            yield from self._in_order(items)
            return
        times = read_arrivals(self.arrival, "arrival").times(random.Random(f"{self.seed} arrival"))
        for item, arrival_s in zip(items, times, strict=False):
            yield replace(item, arrival_s=arrival_s)

    def _format(self) -> str:
        if self.format != "auto":
            return self.format
        number, first = next(read_lines(self.path), (0, "{"))
        if first.strip() == HEADER:
            return "azure"
        if not first.lstrip().startswith("{"):
            problem = f"{first[:80]!r} is neither an object of JSON nor {HEADER}"
            raise ConfigError(f"{self.path}:{number}", problem)
        return "mooncake" if '"input_length"' in first else "own"

    def _in_order(self, items: Iterator[WorkItem]) -> Iterator[WorkItem]:
        last_s = 0.0
        for item in items:
            if item.arrival_s < last_s:
                problem = f"request {item.index} comes at {item.arrival_s} s, before the one that precedes it"
                raise ConfigError(str(self.path), problem)
            last_s = item.arrival_s
            yield item
