"""Engine.decode_ahead: n steps booked at once leave what n single steps leave, to the last block number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import toys
from twinpool.core.clock import ManualClock
from twinpool.core.errors import ServingError
from twinpool.core.request import Request, TokenOutput
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.plan import BatchPlan, ItemResult, LayerHook
from twinpool.engine.policy import policy_names
from twinpool.engine.sequence import SequenceState, SequenceStatus

TOKEN = 7


class SameToken:
    """A runner that chooses the same token always."""

    def run(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        return tuple(ItemResult(token_id=TOKEN if item.samples else None) for item in plan.items)


@dataclass
class Twin:
    """One of two engines that are told the same."""

    config: EngineConfig
    num_blocks: int
    clock: ManualClock = field(default_factory=ManualClock)
    sequences: list[SequenceState] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = EngineLimits(num_blocks=self.num_blocks, max_model_tokens=4096, vocab_size=None)
        self.engine = Engine(SameToken(), config=self.config, limits=limits, clock=self.clock)

    def open(self, kind: str, request: Request) -> str:
        try:
            if kind == "reserve":
                self.sequences.append(self.engine.reserve(request))
            else:
                self.sequences.append(self.engine.submit(request, has_destination=kind == "send"))
        except ServingError as error:
            return str(error)
        return ""

    def move_transfers(self) -> None:
        """Let the oldest transfer end."""
        for sequence in self.sequences:
            if sequence.status is SequenceStatus.RECEIVING:
                if sequence.request.sampling.max_tokens > 1:
                    self.engine.arrived(sequence, TokenOutput(index=0, token_id=TOKEN))
                else:
                    self.engine.abort(sequence)
                return
            if sequence.status in (SequenceStatus.SENDING, SequenceStatus.DRAINING):
                self.engine.drained(sequence)
                return

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    def books(self) -> Any:
        """Everything that a later step could depend on."""
        scheduler = self.engine._scheduler
        prefixes = scheduler._blocks._prefixes
        return (
            [
                (s.status, s.token_ids, s.num_computed_tokens, s.blocks, s.num_published_blocks)
                for s in self.sequences
            ],
            [[s.number for s in line] for line in scheduler._lines.values()],
            self.engine.counts(),
            {name: count for name, count in self.engine.counters.items() if count},
            list(scheduler.pool._free),
            list(scheduler.pool._cached),
            {block: (entry.blocks, entry.name.tokens) for block, entry in prefixes._by_block.items()},
        )


KINDS = st.sampled_from(["submit", "reserve", "send"])
STARTS = st.tuples(KINDS, st.integers(1, 9), st.integers(1, 14), st.integers(0, 2))


@settings(max_examples=400, deadline=None)
@given(
    policy=st.sampled_from(policy_names()),
    prefix_cache=st.booleans(),
    num_blocks=st.integers(4, 24),
    max_sequences=st.integers(1, 5),
    events=st.lists(st.one_of(STARTS, st.integers(1, 12), st.just("transfer")), max_size=30),
)
def test_any_story_ends_alike_stepped_or_booked_ahead(
    policy: str, prefix_cache: bool, num_blocks: int, max_sequences: int, events: list[Any]
) -> None:
    config = EngineConfig(
        block_tokens=3,
        max_batch_tokens=8,
        max_chunk_tokens=4,
        max_sequences=max_sequences,
        policy=policy,
        prefix_cache=prefix_cache,
    )
    stepped, ahead = Twin(config, num_blocks), Twin(config, num_blocks)

    for number, event in enumerate(events):
        if event == "transfer":
            stepped.move_transfers()
            ahead.move_transfers()
        elif isinstance(event, tuple):
            kind, num_tokens, max_tokens, first = event
            request = toys.request(
                (first,) * num_tokens, request_id=str(number), max_tokens=max_tokens, ignore_eos=True
            )
            assert stepped.open(kind, request) == ahead.open(kind, request)
        else:
            stepped.step(event)
            go(ahead, event)
        assert ahead.books() == stepped.books()


def go(twin: Twin, num_steps: int) -> None:
    """Make ``num_steps`` steps, ahead where it is allowed."""
    while num_steps:
        steady = min(twin.engine.steady_steps(), num_steps)
        if steady:
            twin.engine.decode_ahead(steady, TOKEN)
        else:
            twin.step(1)
        num_steps -= steady or 1


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_steady_steps_can_be_booked_in_parts(cut: int) -> None:
    whole, parts = (Twin(EngineConfig(block_tokens=4), 64) for _ in range(2))
    for twin in (whole, parts):
        for number in range(3):
            request = toys.request((number,) * 5, request_id=str(number), max_tokens=11 + number)
            twin.open("submit", request)
        twin.step(1)

    assert whole.engine.steady_steps() == 10
    ended = whole.engine.decode_ahead(10, TOKEN)
    parts.engine.decode_ahead(cut, TOKEN)
    assert parts.engine.steady_steps() == 10 - cut
    parts.engine.decode_ahead(10 - cut, TOKEN)

    assert ended == (whole.sequences[0],)
    assert parts.books() == whole.books()


def test_nothing_is_steady_while_a_prompt_could_start_or_blocks_run_out() -> None:
    twin = Twin(EngineConfig(block_tokens=4, max_sequences=4), 4)
    assert twin.engine.steady_steps() == 0
    twin.open("submit", toys.request((1,) * 4, request_id="a", max_tokens=9))
    assert twin.engine.steady_steps() == 0
    twin.step(1)
    assert twin.engine.steady_steps() == 8
    twin.open("reserve", toys.request((2,) * 5, request_id="b", max_tokens=9))  # leaves no block
    assert twin.engine.steady_steps() == 4
    twin.open("submit", toys.request((3,) * 4, request_id="c", max_tokens=9))
    assert twin.engine.steady_steps() == 0
