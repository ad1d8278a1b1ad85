"""The scheduler: who runs, who gets blocks, who gives them up; any order of events keeps the books."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner, expected_output, next_token
from tests.engine.world import World, engine, prompt
from twinpool.core.clock import ManualClock
from twinpool.core.errors import NoFreeBlocks
from twinpool.core.request import Request, SamplingParams
from twinpool.engine.config import EngineConfig
from twinpool.engine.plan import BatchPlan, ItemResult, QueueView, Work
from twinpool.engine.scheduler import OVERTAKING_S, Scheduler
from twinpool.engine.sequence import SequenceState, SequenceStatus

NUM_SEEDS = 1000


def batch_ids(plan: BatchPlan) -> list[str]:
    return [item.sequence.request.request_id for item in plan.items]


def test_a_sequence_that_ends_leaves_its_seat_to_the_next_one_at_once() -> None:
    """Source: iteration-level scheduling in Orca (Yu et al., OSDI 2022); by request it takes 5 steps."""
    runner = FakeRunner()
    world = engine(runner, max_sequences=2, max_batch_tokens=64)
    for request_id, max_tokens in (("A", 3), ("B", 1), ("C", 2)):
        world.submit(prompt(1, request_id=request_id, max_tokens=max_tokens))

    while world.has_work:
        world.step()

    assert [batch_ids(plan) for plan in runner.plans] == [["A", "B"], ["A", "C"], ["A", "C"]]


def test_a_block_is_taken_only_when_the_one_before_is_full() -> None:
    """Source: Figure 6 of the vLLM paper (Kwon et al., SOSP 2023): blocks of 4, 7 + 2 tokens."""
    world = engine(FakeRunner(), block_tokens=4)
    sequence = world.submit(prompt(7, max_tokens=4))

    held = []
    for _ in range(3):
        world.step()
        held.append((len(sequence.blocks), sequence.num_computed_tokens))

    assert held == [(2, 7), (2, 8), (3, 9)]


def test_prompts_get_the_tokens_that_decodes_leave() -> None:
    """Source: Algorithm 3 of Sarathi-Serve (Agrawal et al., OSDI 2024), with 512 tokens a step."""
    runner = FakeRunner(block_tokens=16)
    world = engine(runner, num_blocks=1000, block_tokens=16, max_batch_tokens=512, max_chunk_tokens=0)
    for i in range(40):
        world.submit(prompt(2, request_id=f"decode{i}", max_tokens=9))
    world.step()
    world.submit(prompt(1000, request_id="long"))
    world.submit(prompt(100, request_id="short"))

    for _ in range(3):
        world.step()

    steps = []
    for plan in runner.plans[1:]:
        items = [(item.sequence.request.request_id, item.num_tokens) for item in plan.items]
        assert [tokens for _, tokens in items[:40]] == [1] * 40
        steps.append(items[40:])
    assert steps == [[("long", 472)], [("long", 472)], [("long", 56), ("short", 100)]]


@pytest.mark.parametrize("max_chunk_tokens", [0, 1, 7, 16])
def test_no_chunk_and_no_batch_is_larger_than_allowed(max_chunk_tokens: int) -> None:
    runner = FakeRunner()
    world = engine(
        runner, num_blocks=100, max_sequences=3, max_batch_tokens=20, max_chunk_tokens=max_chunk_tokens
    )
    requests = [prompt(50 + i, request_id=f"r{i}") for i in range(4)]
    sequences = [world.submit(request) for request in requests]

    while world.has_work:
        world.step()

    for plan in runner.plans:
        assert len(plan.items) <= 3
        assert sum(item.num_tokens for item in plan.items) <= 20
        assert all(item.num_tokens <= (max_chunk_tokens or 20) for item in plan.items)
    for sequence, request in zip(sequences, requests, strict=True):
        assert sequence.token_ids[request.num_tokens :] == expected_output(request)


def test_two_sequences_that_each_hold_half_the_pool_both_finish() -> None:
    world = World(num_blocks=8, block_tokens=4, eos_ids=frozenset())
    for i in range(2):
        world.reserve(prompt(15, request_id=f"r{i}", max_tokens=16))
    assert world.engine.num_free_blocks == 0

    world.run_out()

    assert [life.ends for life in world.lives] == [["length"], ["length"]]
    assert world.engine.counters["preemptions"] == 1


def test_an_arrived_sequence_that_was_preempted_does_not_wait_for_its_arrival_again() -> None:
    world = World(num_blocks=12, block_tokens=4, eos_ids=frozenset())
    requests = [prompt(12, request_id=f"r{i}", max_tokens=20) for i in range(12)]
    for request in requests:
        while True:
            world.reserve(request)
            if world.lives and world.lives[-1].sequence.request is request:
                break
            for life in world.lives:
                world.arrive(life)
            world.step()

    world.run_out()

    assert [life.ends for life in world.lives] == [["length"]] * 12
    assert world.engine.counters["preemptions"] >= 3


def test_twenty_answers_from_a_pool_that_is_too_small_are_those_of_a_large_one() -> None:
    world = World(num_blocks=12, block_tokens=4, eos_ids=frozenset(), max_chunk_tokens=3)
    for i in range(20):
        world.submit(prompt(9 + i % 5, request_id=f"r{i}", max_tokens=20, num_prompt_logprobs=0))

    world.run_out()

    assert world.engine.counters["preemptions"] >= 5
    assert [life.ends for life in world.lives] == [["length"]] * 20
    assert max(life.sequence.num_preemptions for life in world.lives) <= 3


def test_the_youngest_gives_its_blocks_and_the_oldest_goes_on() -> None:
    world = engine(FakeRunner(), num_blocks=6)
    oldest, middle, youngest = (world.submit(prompt(7, request_id=f"r{i}", max_tokens=9)) for i in range(3))

    for _ in range(3):
        world.step()

    assert [oldest.status, middle.status] == [SequenceStatus.DECODING] * 2
    assert youngest.status is SequenceStatus.WAITING
    assert (youngest.num_computed_tokens, youngest.blocks) == (0, [])
    assert youngest.num_output_tokens == 2  # given to its client already, and kept


@pytest.mark.parametrize("kind", ["sending", "receiving"])
def test_blocks_under_a_transfer_are_never_taken(kind: str) -> None:
    runner = FakeRunner()
    world = engine(runner, num_blocks=4)
    oldest = world.submit(prompt(7, request_id="old", max_tokens=9))
    if kind == "sending":
        other = world.submit(prompt(8, request_id="other"), has_destination=True)
    else:
        other = world.reserve(prompt(7, request_id="other"))
    world.step()
    held = list(other.blocks)

    for _ in range(3):
        world.step()

    assert other.status.value == kind
    assert other.blocks == held
    assert oldest.num_output_tokens == 2  # waits for a block
    world.abort(other)
    world.drained(other)
    world.step()
    assert oldest.num_output_tokens == 3


def test_a_prompt_that_does_not_fit_may_be_overtaken_only_for_a_while() -> None:
    """Small prompts keep more than two of twelve blocks busy all the time; the large one needs ten."""
    clock = ManualClock()
    runner = FakeRunner()
    world = engine(runner, clock=clock, num_blocks=12, max_sequences=16)
    for step in range(100):
        world.submit(prompt(3, request_id=f"small{step}", max_tokens=6))
        if step == 10:
            world.submit(prompt(40, request_id="large", max_tokens=1))
        world.step()
        clock.advance(0.1)

    started: list[str] = []
    for plan in runner.plans:
        started += [request_id for request_id in batch_ids(plan) if request_id not in started]
    step_of_large = next(step for step, plan in enumerate(runner.plans) if "large" in batch_ids(plan))
    num_overtakers = len([i for i in range(11, 100) if f"small{i}" in started[: started.index("large")]])
    assert num_overtakers >= 10  # small ones do not wait behind it at once
    assert OVERTAKING_S <= (step_of_large - 10) * 0.1 <= OVERTAKING_S + 1.0
    assert "small60" in started


def test_a_prompt_does_not_take_the_block_that_a_decode_needs_now() -> None:
    world = engine(FakeRunner(), num_blocks=3, policy="prefill_first")
    old = world.submit(prompt(7, request_id="old", max_tokens=5))
    for _ in range(2):
        world.step()
    young = world.submit(prompt(2, request_id="young", max_tokens=2))

    world.step()

    assert len(old.blocks) == 3
    assert (young.status, young.num_preemptions) == (SequenceStatus.WAITING, 0)


def test_a_twice_preempted_sequence_comes_back_when_the_older_ones_cannot_take_its_blocks() -> None:
    world = World(num_blocks=24, block_tokens=1, eos_ids=frozenset())
    for i in range(6):
        world.submit(prompt(1, request_id=f"r{i}", max_tokens=20))

    world.run_out()

    assert [life.sequence.num_preemptions for life in world.lives] == [0, 1, 2, 2, 2, 2]


def test_a_held_line_holds_for_reservations_too() -> None:
    clock = ManualClock()
    world = engine(FakeRunner(), clock=clock, num_blocks=8)
    world.submit(prompt(8, request_id="occupant", max_tokens=20))
    world.submit(prompt(28, request_id="large", max_tokens=1))
    world.step()
    world.drained(world.reserve(prompt(3, request_id="early")))
    clock.advance(OVERTAKING_S)

    with pytest.raises(NoFreeBlocks, match="need 1 KV blocks, 0 of 8 are free"):
        world.reserve(prompt(3, request_id="late"))


def test_a_started_prompt_has_room_for_all_its_tokens_so_no_two_can_block_each_other() -> None:
    world = engine(FakeRunner(), num_blocks=8, max_batch_tokens=8, max_sequences=4)
    first = world.submit(prompt(20, request_id="first", max_tokens=1))
    second = world.submit(prompt(20, request_id="second", max_tokens=1))

    world.step()

    assert (first.status, len(first.blocks)) == (SequenceStatus.PREFILLING, 5)
    assert (second.status, len(second.blocks)) == (SequenceStatus.WAITING, 0)


class _Offers:
    """A policy that makes fixed offers."""

    def __init__(self, *works: Work) -> None:
        self._works = works

    def candidates(self, view: QueueView) -> Iterator[Work]:
        yield from self._works


@pytest.mark.parametrize(
    ("num_tokens", "times", "message"),
    [(5, 1, "5 of 4 tokens"), (0, 1, "0 of 4 tokens"), (1, 2, "offered a sequence twice")],
)
def test_a_policy_that_breaks_its_contract_is_reported(num_tokens: int, times: int, message: str) -> None:
    sequence = SequenceState(number=0, request=prompt(4), arrived_s=0.0)
    policy = _Offers(*[Work(sequence, num_tokens)] * times)
    scheduler = Scheduler(EngineConfig(), policy, num_blocks=8, eos_ids=frozenset())
    scheduler.enqueue(sequence)

    with pytest.raises(AssertionError, match=message):
        scheduler.plan(0.0)


def test_a_policy_cannot_offer_what_is_not_in_its_view() -> None:
    stranger = SequenceState(number=0, request=prompt(4), arrived_s=0.0)
    scheduler = Scheduler(EngineConfig(), _Offers(Work(stranger, 1)), num_blocks=8, eos_ids=frozenset())

    with pytest.raises(AssertionError, match="of its view"):
        scheduler.plan(0.0)


class _YoungestFirst:
    def candidates(self, view: QueueView) -> Iterator[Work]:
        for sequence in reversed(view.decoding):
            yield Work(sequence, 1)
        for sequence in view.waiting:
            yield Work(sequence, sequence.num_uncomputed_tokens)


def test_a_sequence_preempted_after_it_was_planned_leaves_the_batch() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=4), _YoungestFirst(), num_blocks=4, eos_ids=frozenset())
    old = SequenceState(number=0, request=prompt(7, request_id="old", max_tokens=9), arrived_s=0.0)
    young = SequenceState(number=1, request=prompt(5, request_id="young", max_tokens=9), arrived_s=0.0)
    for sequence in (old, young):
        scheduler.enqueue(sequence)
    for _ in range(2):
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, [ItemResult(token_id=1)] * len(plan.items))

    plan = scheduler.plan(0.0)

    assert [item.sequence for item in plan.items] == [old]
    assert young.status is SequenceStatus.WAITING


def _random_request(rng: random.Random, request_id: str) -> Request:
    """A request that often begins as others do, and sometimes goes on as they were answered."""
    max_tokens = rng.randrange(1, 25)
    num_outputs = rng.randrange(max_tokens) if rng.random() < 0.2 else 0
    prompt_ids = [rng.choice([7, 8])] * rng.choice([0, 4, 9, 16])
    prompt_ids += [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 8]))]
    for _ in range(rng.choice([0, 0, 5])):
        prompt_ids.append(next_token(prompt_ids))
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids) or (7,),
        output_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_outputs)),
        cache_salt=rng.choice(["", "", "tenant"]),
        timeout_s=rng.choice([3.0, 30.0, 1000.0]),
        sampling=SamplingParams(seed=0, max_tokens=max_tokens, num_prompt_logprobs=rng.choice([None, 0])),
    )


def _random_world(rng: random.Random) -> World:
    max_sequences = rng.choice([1, 2, 4, 16])
    return World(
        num_blocks=rng.choice([4, 6, 8, 12, 20]),
        block_tokens=rng.choice([1, 2, 4, 5]),
        eos_ids=frozenset({3}) if rng.random() < 0.3 else frozenset(),
        policy=rng.choice(["decode_first", "prefill_first"]),
        max_sequences=max_sequences,
        max_batch_tokens=rng.choice([max_sequences, max_sequences + 3, 64]),
        max_chunk_tokens=rng.choice([0, 1, 3, 16]),
        max_waiting=rng.choice([1, 4, 32]),
        prefix_cache=rng.random() < 0.9,
    )


EVENTS = ("submit", "submit", "submit with destination", "reserve", "advance", "arrive", "abort", "drain",
          "scribble", "step", "step", "step", "step", "step", "step")  # fmt: skip


def _play(world: World, event: str, rng: random.Random, request_id: str) -> None:
    if event.startswith("submit"):
        world.submit(_random_request(rng, request_id), has_destination=event != "submit")
    elif event == "reserve":
        world.reserve(_random_request(rng, request_id))
    elif event == "advance":
        world.advance(rng.choice([0.1, 1.0, 3.0]))
    elif event == "step":
        world.step()
    elif world.lives:
        life = rng.choice(world.lives)
        {"arrive": world.arrive, "abort": world.abort, "drain": world.drain, "scribble": world.scribble}[
            event
        ](life)


def test_random_schedules_keep_every_invariant() -> None:
    counters: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        world = _random_world(rng)
        try:
            for i in range(rng.randrange(5, 80)):
                _play(world, rng.choice(EVENTS), rng, f"r{i}")
            world.run_out()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        counters.update(world.engine.counters)

    for name in ("preemptions", "prefix_hit_tokens", "evicted_blocks"):
        assert counters[name] > NUM_SEEDS // 10, f"{name} were not tested"


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), events=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=60))
def test_schedules_that_can_be_shrunk_keep_every_invariant(seed: int, events: list[str]) -> None:
    rng = random.Random(seed)
    world = _random_world(rng)

    for i, event in enumerate(events):
        _play(world, event, random.Random(seed + i), f"r{i}")
    world.run_out()
