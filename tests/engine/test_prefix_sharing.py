"""An engine computes equal prefixes once: what is found, when it can be found, and by whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import toys
from tests.engine.fake_runner import FakeRunner, expected_output, next_token
from tests.engine.world import World, engine, nothing_is_held
from twinpool.core.errors import InvalidRequest, NoFreeBlocks, ServingError
from twinpool.core.request import Request, TokenOutput
from twinpool.engine.engine import Engine
from twinpool.engine.plan import BatchPlan
from twinpool.engine.sequence import SequenceState

LENGTHS = (3, 4, 5, 7, 8, 9, 12, 13, 16, 17)  # around the ends of blocks of 4 tokens


def counting(num_tokens: int, *, request_id: str = "r0", salt: str = "", **fields: int) -> Request:
    """A prompt of 1, 2, 3 ...: shorter ones are prefixes of longer ones."""
    request = toys.request(tuple(range(1, num_tokens + 1)), request_id=request_id, **fields)
    return replace(request, cache_salt=salt)


def answer(world: Engine, request: Request) -> list[TokenOutput]:
    """Run one request to its end."""
    world.submit(request)
    outputs: list[TokenOutput] = []
    while world.has_work:
        result = world.step()
        assert not result.failed
        outputs += [output for _, output in result.outputs]
    return outputs


def received(world: Engine, runner: FakeRunner, request: Request) -> SequenceState:
    """Let a reservation's missing KV arrive, and start to decode it."""
    sequence = world.reserve(request)
    runner.fill(sequence.blocks, sequence.token_ids, first_token=sequence.num_cached_tokens)
    world.arrived(sequence, TokenOutput(index=0, token_id=next_token(sequence.token_ids)))
    return sequence


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_prompt_asked_again_is_computed_from_its_last_block_on(num_tokens: int) -> None:
    runner = FakeRunner()
    world = engine(runner)
    request = counting(num_tokens, max_tokens=3)

    cold, warm = answer(world, request), answer(world, request)

    first_tokens = [plan.items[0].first_token for plan in runner.plans if plan.items[0].samples][0:4:3]
    num_cached = (num_tokens - 1) // 4 * 4  # full blocks, but never the last token
    assert first_tokens == [0, num_cached]
    assert [output.token_id for output in cold] == expected_output(request)
    assert [output.token_id for output in warm] == expected_output(request)
    assert [output.cached_tokens for output in cold] == [0, 0, 0]
    assert [output.cached_tokens for output in warm] == [num_cached, 0, 0]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_reservation_finds_all_full_blocks_and_only_the_rest_must_come(num_tokens: int) -> None:
    runner = FakeRunner()
    world = engine(runner, num_blocks=16)
    request = counting(num_tokens, max_tokens=6)

    cached = []
    for _ in range(3):
        sequence = received(world, runner, request)
        cached.append(sequence.num_cached_tokens)
        while world.has_work:
            world.step()
        assert sequence.token_ids[num_tokens:] == expected_output(request)

    assert cached == [0, num_tokens // 4 * 4, num_tokens // 4 * 4]


def test_the_next_turn_finds_prompt_and_answer_of_the_last_one() -> None:
    world = engine(FakeRunner(), num_blocks=16)
    turn = counting(6, max_tokens=7)
    said = [output.token_id for output in answer(world, turn)]

    next_turn = replace(turn, prompt_ids=(*turn.prompt_ids, *said, 90, 91))
    outputs = answer(world, next_turn)

    assert outputs[0].cached_tokens == 12  # 6 + 7 tokens, the last of which was never computed
    assert [output.token_id for output in outputs] == expected_output(next_turn)


def test_tenants_do_not_find_each_others_blocks() -> None:
    world = engine(FakeRunner(), num_blocks=32)

    cached = [
        answer(world, counting(12, salt=salt))[0].cached_tokens for salt in ("a", "b", "", "a", "b", "", "c")
    ]
    reserved = [world.reserve(counting(12, salt=salt)).num_cached_tokens for salt in ("a", "d")]

    assert cached == [0, 0, 0, 8, 8, 8, 0]
    assert reserved == [12, 0]


def test_what_a_prompt_finds_is_decided_when_it_starts_not_when_it_comes() -> None:
    world = engine(FakeRunner(), max_sequences=1, max_batch_tokens=64)
    world.submit(counting(12, request_id="early"))
    late = world.submit(counting(12, request_id="late"))

    while world.has_work:
        world.step()

    assert late.num_cached_tokens == 8


def test_prompts_that_start_together_cannot_find_what_neither_has_computed() -> None:
    runner = FakeRunner()
    world = engine(runner)
    requests = [counting(9, request_id=f"r{i}") for i in range(2)]
    sequences = [world.submit(request) for request in requests]
    while world.has_work:
        world.step()

    assert [item.num_tokens for item in runner.plans[0].items] == [9, 9]
    for sequence, request in zip(sequences, requests, strict=True):
        assert sequence.token_ids[9:] == expected_output(request)
    assert world.counts().cached == 3  # of six equal ones in pairs


def test_a_chunk_can_be_found_while_the_rest_of_its_prompt_is_computed() -> None:
    world = engine(FakeRunner(), num_blocks=16, max_chunk_tokens=8)
    first = world.submit(counting(20, request_id="long"))
    world.step()
    second = world.submit(counting(10, request_id="short"))
    world.step()

    assert second.num_cached_tokens == 8
    assert second.blocks[:2] == first.blocks[:2]
    assert world.counts().owned == 6 + 3 - 2


def test_a_request_that_wants_prompt_logprobs_reuses_nothing_and_leaves_its_kv_behind() -> None:
    world = engine(FakeRunner())
    asked = toys.request(tuple(range(1, 10)), num_prompt_logprobs=0)

    firsts = [answer(world, request)[0] for request in (asked, asked, counting(9))]

    assert [first.cached_tokens for first in firsts] == [0, 0, 8]
    assert [first.prompt_logprobs is not None for first in firsts] == [True, True, False]


def test_a_reservation_finds_blocks_whatever_its_prefill_worker_computes() -> None:
    runner = FakeRunner()
    world = engine(runner)
    answer(world, counting(8))

    assert world.reserve(toys.request(tuple(range(1, 9)), num_prompt_logprobs=0)).num_cached_tokens == 8


@pytest.mark.parametrize(("kind", "num_kept"), [("item", 2), ("step", 0)])
def test_what_a_failed_step_wrote_is_never_found(kind: str, num_kept: int) -> None:
    """When a whole step fails nothing is believed any more, so that broken KV cannot fail every step."""
    errors: dict[str, ServingError] = {"nobody": InvalidRequest("seed", "it is wrong")}

    def break_second_chunk(plan: BatchPlan) -> None:
        if plan.items[0].sequence.request.request_id == "bad" and plan.items[0].first_token == 8:
            errors["bad"] = InvalidRequest("logit_bias", "it is wrong")
            if kind == "step":
                raise ZeroDivisionError("broken kernel")

    runner = FakeRunner(before_step=break_second_chunk, item_errors=errors)
    world = engine(runner, num_blocks=16, max_chunk_tokens=8)
    world.submit(counting(17, request_id="bad"))

    num_failed = sum(len(world.step().failed) for _ in range(2))

    assert num_failed == 1
    assert world.counts().cached == num_kept  # of the chunk before
    assert answer(world, counting(17))[0].cached_tokens == num_kept * 4


@pytest.mark.parametrize("num_arrived", [0, 11, 12])
def test_what_an_aborted_transfer_wrote_is_never_found(num_arrived: int) -> None:
    runner = FakeRunner()
    world = engine(runner)
    sequence = world.reserve(counting(12))
    runner.fill(sequence.blocks, sequence.token_ids[:num_arrived])

    world.abort(sequence)
    draining = world.reserve(counting(12, request_id="r1")).num_cached_tokens
    world.drained(sequence)

    assert (draining, world.reserve(counting(12, request_id="r2")).num_cached_tokens) == (0, 0)
    assert world.counts().cached == 0


def test_a_failed_transfer_leaves_what_was_there_before_it() -> None:
    runner = FakeRunner()
    world = engine(runner)
    answer(world, counting(8))
    sequence = world.reserve(counting(16, request_id="r1"))

    world.drained(sequence)

    assert sequence.num_cached_tokens == 8
    assert world.reserve(counting(16, request_id="r2")).num_cached_tokens == 8


def test_a_prompt_that_leaves_can_be_shared_while_it_is_sent() -> None:
    world = engine(FakeRunner())
    sent = world.submit(counting(12), has_destination=True)
    world.step()
    other = world.submit(counting(12, request_id="r1"), has_destination=True)
    world.step()

    world.abort(sent)
    after_abort = world.counts()
    world.drained(sent)
    after_drain = world.counts()
    world.drained(other)

    assert other.num_cached_tokens == 8
    assert (after_abort.owned, after_abort.draining) == (3, 1)  # two are shared with one that is not over
    assert (after_drain.owned, after_drain.draining) == (3, 0)
    assert nothing_is_held(world.counts())


def test_cached_tokens_are_told_to_the_listener_with_the_first_layer() -> None:
    world = engine(FakeRunner(num_layers=1))
    answer(world, counting(12))
    leaving = world.submit(counting(12, request_id="r1"), has_destination=True)
    written: list[tuple[int, int]] = []

    world.step(lambda layer, progress: written.extend((layer, tokens) for _, tokens in progress))

    assert leaving.num_cached_tokens == 8
    assert written == [(0, 12)]


def test_a_preempted_sequence_finds_again_what_was_not_taken() -> None:
    world = World(num_blocks=8, block_tokens=4, eos_ids=frozenset())
    requests = [
        toys.request(tuple(range(start, start + 15)), request_id=f"r{start}", max_tokens=8)
        for start in (1, 50)
    ]
    for request in requests:
        world.submit(request)

    world.run_out()

    victim = world.lives[1]
    assert victim.sequence.num_preemptions == 1
    assert [output.cached_tokens for output in victim.outputs] == [0] * 8  # it computed all of it itself
    assert world.engine.counters["prefix_hit_tokens"] >= 8
    assert world.engine.counters["prefilled_tokens"] < 15 + 15 + 16


def test_a_prompt_preempted_in_its_middle_was_not_cached_when_it_came() -> None:
    world = engine(FakeRunner(), num_blocks=9, max_chunk_tokens=2)
    old = world.submit(toys.request(tuple(range(40, 55)), request_id="old", max_tokens=9))
    while old.num_computed_tokens < 16:
        world.step()
    young = world.submit(counting(13, request_id="young"))
    outputs: list[TokenOutput] = []
    while world.has_work:
        outputs += [output for sequence, output in world.step().outputs if sequence is young]

    assert (young.num_preemptions, young.has_emitted) == (1, True)
    assert world.counters["prefix_hit_tokens"] == 8
    assert [output.cached_tokens for output in outputs] == [0, 0, 0, 0]


def test_an_answer_that_is_continued_counts_only_what_the_prompt_had() -> None:
    world = engine(FakeRunner(), num_blocks=16)
    request = counting(6, max_tokens=12)
    said = tuple(output.token_id for output in answer(world, request))

    (first, *_) = answer(world, replace(request, output_ids=said[:8]))

    assert (first.index, first.cached_tokens) == (8, 6)  # 12 of 14 tokens were there, 6 of them prompt


def test_blocks_that_are_found_need_no_room() -> None:
    world = engine(FakeRunner(), num_blocks=8)
    held = world.submit(counting(20, max_tokens=4), has_destination=True)
    world.step()

    shared = world.reserve(counting(21, request_id="r1", max_tokens=4))

    assert (len(held.blocks), shared.num_cached_tokens, world.num_free_blocks) == (5, 20, 2)
    with pytest.raises(NoFreeBlocks, match="need 6 KV blocks, 2 of 8 are free"):
        world.reserve(counting(21, request_id="r2", salt="other", max_tokens=4))


def test_cached_blocks_count_as_free_until_they_are_used_again() -> None:
    world = engine(FakeRunner(), num_blocks=8)

    answer(world, counting(17))

    assert (world.counts().cached, world.num_free_blocks) == (5, 8)
    assert answer(world, toys.request(tuple(range(40, 65)), max_tokens=4))[0].cached_tokens == 0
    assert world.counters["evicted_blocks"] == 4
    assert answer(world, counting(17))[0].cached_tokens == 4


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    world = engine(FakeRunner(), prefix_cache=False)
    request = counting(9)

    firsts = [answer(world, request)[0] for _ in range(2)]

    assert [first.cached_tokens for first in firsts] == [0, 0]
    assert world.counts().free == world.counts().total
    assert "prefix_query_tokens" not in world.counters


def test_a_cleared_cache_finds_nothing_and_disturbs_nobody() -> None:
    world = engine(FakeRunner(), num_blocks=16)
    answer(world, counting(12))
    answer(world, counting(12, salt="other"))
    running = counting(30, request_id="running", max_tokens=6)
    sequence = world.submit(running)
    world.step()

    num_freed = world.clear_cache()
    while world.has_work:
        world.step()

    assert num_freed == 3  # of the other; the running one holds the three that it found
    assert sequence.token_ids[30:] == expected_output(running)
    assert world.reserve(counting(12, request_id="r1")).num_cached_tokens == 0


def test_hits_and_questions_are_counted() -> None:
    world = engine(FakeRunner(), num_blocks=16)
    for _ in range(3):
        answer(world, counting(10))

    counters = world.counters
    assert (counters["prefix_query_tokens"], counters["prefix_hit_tokens"]) == (30, 16)
    assert counters["prefilled_tokens"] == 30 - 16
