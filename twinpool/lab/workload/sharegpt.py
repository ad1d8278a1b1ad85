"""Conversations of several turns: each prompt begins with all that was said before it.

The shape is that of the ShareGPT conversations; no text of anybody is in it.  Turns come at times that are
known beforehand, as in a trace: who answers slowly gets the next turn nevertheless.  What a turn repeats of
earlier answers is therefore not what the server said; it finds cached what it was sent, up to there.

Source:
    Mean lengths of prompts and answers: ShareGPT in Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention" (SOSP 2023), figure 11.  The other defaults are ours.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.arrivals import read_arrivals
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.lengths import read_lengths

_BLOCKS_EACH = 1 << 24  # numbers of blocks that one conversation or one system prompt can have


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGPT:
    """Without end, unless a number of ``conversations`` is said."""

    arrival: str = "poisson(0.3)"  # of conversations, not of turns
    turns: float = 3.5  # mean of a geometric distribution
    message: str = "lognormal(161, sigma=1.2)"  # what a person says in one turn
    output: str = "lognormal(338, sigma=0.9)"
    think_s: float = 30.0  # mean of the exponential time from one turn of a conversation to the next
    systems: int = 4  # different system prompts; a conversation has one of them
    system_tokens: int = 128  # of each, before the first turn; 0: there are none
    block_tokens: int = 16
    max_context_tokens: int = (
        8192  # a conversation ends before a turn that would be longer, its answer included
    )
    conversations: int | None = None  # how many begin
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("message", "output"):
            read_lengths(getattr(self, name), f"workload.{name}")
        read_arrivals(self.arrival, "workload.arrival")
        for name, least in (("turns", 1.0), ("systems", 1), ("system_tokens", 0), ("block_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"workload.{name}", f"{getattr(self, name)} is less than {least}")
        if self.conversations is not None and self.conversations < 1:
            raise ConfigError("workload.conversations", f"{self.conversations} is less than 1")
        if self.think_s < 0.0:
            raise ConfigError("workload.think_s", f"{self.think_s} is negative")
        if self.max_context_tokens < self.system_tokens + 2:
            raise ConfigError(
                "workload.max_context_tokens",
                f"{self.max_context_tokens} has no room behind system_tokens, {self.system_tokens}",
            )

    @property
    def ends(self) -> bool:
        return self.conversations is not None

    @property
    def is_drawn(self) -> bool:
        return True

    def items(self) -> Iterator[WorkItem]:
        """Yield the turns of all conversations in the order of time; only those that go on are in memory."""
        begins = read_arrivals(self.arrival, "arrival").times(random.Random(f"{self.seed} arrival"))
        # The next turn of each conversation that goes on, the earliest first, with those that follow it.
        coming: list[tuple[float, int, _Turn, Iterator[_Turn]]] = []
        index = 0
        for number, begin_s in enumerate(islice(begins, self.conversations)):
            while coming and coming[0][0] <= begin_s:
                yield self._item(index, *_pop(coming))
                index += 1
            _push(coming, number, self._turns(number, begin_s))
        while coming:
            yield self._item(index, *_pop(coming))
            index += 1

    def _turns(self, number: int, begin_s: float) -> Iterator[_Turn]:
        source = random.Random(f"{self.seed} conversation {number}")
        message, output = read_lengths(self.message, "message"), read_lengths(self.output, "output")
        system = source.randrange(self.systems)
        now_s, said_tokens = begin_s, self.system_tokens
        while True:
            prompt_tokens, output_tokens = said_tokens + message.draw(source), output.draw(source)
            if prompt_tokens + output_tokens > self.max_context_tokens:
                if said_tokens > self.system_tokens:
                    return
                prompt_tokens = min(prompt_tokens, self.max_context_tokens - 1)
                output_tokens = min(output_tokens, self.max_context_tokens - prompt_tokens)
            yield _Turn(now_s, system, prompt_tokens, output_tokens)
            if source.random() >= 1 - 1 / self.turns:
                return
            said_tokens = prompt_tokens + output_tokens
            now_s += source.expovariate(1.0) * self.think_s

    def _item(self, index: int, number: int, turn: _Turn) -> WorkItem:
        return WorkItem(
            index=index,
            arrival_s=turn.arrival_s,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            blocks=self._blocks(number, turn),
            block_tokens=self.block_tokens,
            conversation=f"c{number}",
        )

    def _blocks(self, number: int, turn: _Turn) -> tuple[int, ...]:
        """Number the blocks: those that a system prompt fills are of all that have it, the others of one."""
        shared = self.system_tokens // self.block_tokens
        all_blocks = math.ceil(turn.prompt_tokens / self.block_tokens)
        of_system, own = turn.system * _BLOCKS_EACH, (self.systems + number) * _BLOCKS_EACH
        return (*range(of_system, of_system + shared), *range(own + shared, own + all_blocks))


@dataclass(frozen=True, slots=True)
class _Turn:
    arrival_s: float
    system: int
    prompt_tokens: int
    output_tokens: int


def _push(
    coming: list[tuple[float, int, _Turn, Iterator[_Turn]]], number: int, turns: Iterator[_Turn]
) -> None:
    turn = next(turns, None)
    if turn is not None:
        heapq.heappush(coming, (turn.arrival_s, number, turn, turns))


def _pop(coming: list[tuple[float, int, _Turn, Iterator[_Turn]]]) -> tuple[int, _Turn]:
    """Take the earliest turn, and let the one that follows it come."""
    _, number, turn, turns = heapq.heappop(coming)
    _push(coming, number, turns)
    return number, turn
