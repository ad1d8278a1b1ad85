"""Requests that every layout is offered, at any rate: the same ones for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.rate import mean_rate
from twinpool.lab.workload.workload import Workload

LEAST_REQUESTS = 20  # of a repeat: of fewer no share can be told


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """A few repeats of a workload, each as it comes at one request per second on average.

    Attributes:
        are_parts: The repeats are parts of one workload, one after the other, since it has no seed.
        own_rate: Requests per second of the workload as it is, of the first repeat.
    """

    repeats: tuple[tuple[WorkItem, ...], ...]
    are_parts: bool
    own_rate: float

    def at_rate(self, repeat: int, rate: float) -> Iterator[WorkItem]:
        """Yield the requests of a repeat at ``rate`` requests per second."""
        for item in self.repeats[repeat]:
            yield replace(item, arrival_s=item.arrival_s / rate)

    def at_once(self, repeat: int, *, copies: int) -> Iterator[WorkItem]:
        """Yield the requests of a repeat so many times over, all at the start; copies share no prefix."""
        items = self.repeats[repeat]
        num_contents = 1 + max((block for item in items for block in item.blocks), default=0)
        for copy in range(copies):
            for item in items:
                yield replace(
                    item,
                    index=copy * len(items) + item.index,
                    arrival_s=0.0,
                    blocks=tuple(copy * num_contents + block for block in item.blocks),
                )

    def with_longer_prompts(self, factor: int) -> OfferedLoad:
        """Return the same requests with prompts ``factor`` times as long; equal prefixes stay equal."""
        repeats = tuple(
            tuple(
                replace(
                    item,
                    prompt_tokens=item.prompt_tokens * factor,
                    block_tokens=item.block_tokens * factor,
                )
                for item in items
            )
            for items in self.repeats
        )
        return replace(self, repeats=repeats)


def offer(workload: Workload, *, repeats: int, needs_rate: bool) -> OfferedLoad:
    """Go through a workload ``repeats`` times, each time with another seed; one without any is cut in parts.

    Raises:
        ConfigError: It has too few requests, or all come at once where ``needs_rate``.
    """
    draws = [list(_with_seed(workload, number)) for number in range(repeats)]
    are_parts = repeats > 1 and draws[0] == draws[1]
    if are_parts:
        size = len(draws[0]) // repeats
        draws = [draws[0][number * size : (number + 1) * size] for number in range(repeats)]
    if len(draws[0]) < LEAST_REQUESTS:
        raise ConfigError(
            "workload",
            f"{len(draws[0])} requests for each of {repeats} repeats are less than {LEAST_REQUESTS}",
        )
    rates = [
        mean_rate(len(items), first_s=items[0].arrival_s, last_s=items[-1].arrival_s) or 0.0
        for items in draws
    ]
    if needs_rate and 0.0 in rates:
        raise ConfigError("workload", "all requests come at once, so that there is no rate to look for")
    return OfferedLoad(
        repeats=tuple(_at_one(items, rate or 1.0) for items, rate in zip(draws, rates, strict=True)),
        are_parts=are_parts,
        own_rate=rates[0],
    )


def _with_seed(workload: Workload, number: int) -> Workload:
    source = workload.source
    if number and is_dataclass(source) and "seed" in [field.name for field in fields(source)]:
        return replace(workload, source=replace(source, seed=source.seed + number))
    return workload


def _at_one(items: Sequence[WorkItem], rate: float) -> tuple[WorkItem, ...]:
    first_s = items[0].arrival_s
    return tuple(
        replace(item, index=number, arrival_s=(item.arrival_s - first_s) * rate)
        for number, item in enumerate(items)
    )
