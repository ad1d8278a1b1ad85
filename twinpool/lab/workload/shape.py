"""What is done to any workload: a window of its time, another pace, fewer or shorter requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The window is in the workload's own time, and what is left of it begins at 0; then ``speed`` counts."""

    start_s: float = 0.0
    end_s: float | None = None  # requests at this moment are out
    speed: float = 1.0  # 2: the same requests at twice the rate
    skip: int = 0  # of the window's requests, that many are left out, and the next one comes at 0
    count: int | None = None  # of those that are left, from the first one
    max_prompt_tokens: int | None = None  # what is longer is cut, but no text
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.start_s < 0.0:
            raise ConfigError("workload.start_s", f"{self.start_s} is negative")
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ConfigError("workload.end_s", f"{self.end_s} is not after start_s, {self.start_s}")
        if not 1e-9 <= self.speed <= 1e9:
            raise ConfigError("workload.speed", f"{self.speed} is not in [1e-9, 1e9]")
        if self.skip < 0:
            raise ConfigError("workload.skip", f"{self.skip} is negative")
        for name in ("count", "max_prompt_tokens", "max_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"workload.{name}", f"{value} is less than 1")

    @property
    def ends(self) -> bool:
        """Whether it ends what does not end by itself."""
        return self.count is not None or self.end_s is not None

    def of(self, items: Iterable[WorkItem]) -> Iterator[WorkItem]:
        """Yield what this shape leaves, numbered from 0; reads no further than it must."""
        index, is_cut = 0, bool(self.max_prompt_tokens or self.max_output_tokens)
        skipped, origin_s = 0, self.start_s
        for item in items:
            if item.arrival_s < self.start_s:
                continue
            if self.end_s is not None and item.arrival_s >= self.end_s:
                return
            if skipped < self.skip:
                skipped += 1
                continue
            if skipped and not index:
                origin_s = item.arrival_s
            arrival_s = (item.arrival_s - origin_s) / self.speed
            is_same = index == item.index and arrival_s == item.arrival_s
            shaped = item if is_same else replace(item, index=index, arrival_s=arrival_s)
            yield self._cut(shaped) if is_cut else shaped
            index += 1
            if index == self.count:
                return

    def _cut(self, item: WorkItem) -> WorkItem:
        longest = item.prompt_tokens if item.text else self.max_prompt_tokens or item.prompt_tokens
        prompt = min(item.prompt_tokens, longest)
        output = min(item.output_tokens, self.max_output_tokens or item.output_tokens)
        if (prompt, output) == (item.prompt_tokens, item.output_tokens):
            return item
        blocks = item.blocks[: math.ceil(prompt / item.block_tokens)] if item.blocks else ()
        return replace(item, prompt_tokens=prompt, output_tokens=output, blocks=blocks)
