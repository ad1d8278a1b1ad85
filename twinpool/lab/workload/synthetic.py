"""Requests with drawn lengths at drawn times, whose prompts have nothing in common."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from twinpool.lab.workload.arrivals import read_arrivals
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.lengths import read_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Without end: a count or a time ends it.

    Prompts, answers and arrivals are drawn apart: changing one of them leaves the others as they were.
    """

    prompt: str = "lognormal(512)"  # as ``lengths.read_lengths`` reads it
    output: str = "lognormal(128)"
    arrival: str = "poisson(1)"  # as ``arrivals.read_arrivals`` reads it
    seed: int = 0

    def __post_init__(self) -> None:
        read_lengths(self.prompt, "workload.prompt")
        read_lengths(self.output, "workload.output")
        read_arrivals(self.arrival, "workload.arrival")

    @property
    def ends(self) -> bool:
        return False

    @property
    def is_drawn(self) -> bool:
        return True

    def items(self) -> Iterator[WorkItem]:
        """Yield the requests, the same ones each time."""
        prompts, outputs = read_lengths(self.prompt, "prompt"), read_lengths(self.output, "output")
        of_prompts, of_outputs = random.Random(f"{self.seed} prompt"), random.Random(f"{self.seed} output")
        times = read_arrivals(self.arrival, "arrival").times(random.Random(f"{self.seed} arrival"))
        for index, arrival_s in enumerate(times):
            yield WorkItem(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=prompts.draw(of_prompts),
                output_tokens=outputs.draw(of_outputs),
            )
