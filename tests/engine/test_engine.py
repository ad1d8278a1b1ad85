"""The engine: what it refuses at once, how sequences end, and that one request's failure stays its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import toys
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner, expected_output, next_token
from tests.engine.world import World, engine, nothing_is_held, prompt
from twinpool.core.clock import ManualClock
from twinpool.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoFreeBlocks,
    PromptTooLong,
    QueueFull,
    RequestCancelled,
    ServingError,
)
from twinpool.core.request import FinishReason, Request, TokenOutput
from twinpool.engine.engine import Engine
from twinpool.engine.plan import BatchPlan
from twinpool.engine.sequence import SequenceState, SequenceStatus


def run(world: Engine) -> list[tuple[str, TokenOutput | ServingError]]:
    """Step until nothing can run; return all events by request id."""
    events: list[tuple[str, TokenOutput | ServingError]] = []
    while True:
        result = world.step()
        events += [(sequence.request.request_id, output) for sequence, output in result.outputs]
        events += [(sequence.request.request_id, error) for sequence, error in result.failed]
        if result.num_items == 0:
            return events


def outputs(events: list[tuple[str, TokenOutput | ServingError]]) -> list[TokenOutput]:
    return [event for _, event in events if isinstance(event, TokenOutput)]


def reserved(world: Engine, runner: FakeRunner, request: Request) -> tuple[SequenceState, TokenOutput]:
    """A reservation whose KV is there, and the first token."""
    sequence = world.reserve(request)
    runner.fill(sequence.blocks, sequence.token_ids)
    first = TokenOutput(index=len(request.output_ids), token_id=next_token(sequence.token_ids))
    return sequence, first


def test_tokens_are_numbered_and_the_last_one_says_why() -> None:
    world = engine(FakeRunner())
    request = prompt(5, max_tokens=3)
    world.submit(request)

    answer = outputs(run(world))

    assert [output.token_id for output in answer] == expected_output(request)
    assert [output.index for output in answer] == [0, 1, 2]
    assert [output.finish for output in answer] == [None, None, FinishReason.LENGTH]
    assert nothing_is_held(world.counts())
    assert dict(world.counters) == {
        "steps": 3,
        "prefix_query_tokens": 5,
        "prefix_hit_tokens": 0,
        "evicted_blocks": 0,
        "prefilled_tokens": 5,
        "decoded_tokens": 2,
        "generated_tokens": 3,
        "finished_length": 1,
    }


def test_the_model_end_token_ends_an_answer() -> None:
    request = prompt(5, max_tokens=9)
    eos_id = expected_output(request)[3]
    world = engine(FakeRunner(), eos_ids=frozenset({eos_id}))
    world.submit(request)

    answer = outputs(run(world))

    assert [output.finish for output in answer][-1] is FinishReason.STOP
    assert [output.token_id for output in answer] == expected_output(request, eos_ids=frozenset({eos_id}))


def test_a_continued_request_goes_on_where_the_first_attempt_stopped() -> None:
    request = prompt(5, max_tokens=6)
    whole = expected_output(request)
    world = engine(FakeRunner())
    world.submit(replace(request, output_ids=tuple(whole[:2])))

    answer = outputs(run(world))

    assert [(output.index, output.token_id) for output in answer] == list(enumerate(whole))[2:]


def test_a_continued_request_that_has_all_its_tokens_is_invalid() -> None:
    request = replace(prompt(5, max_tokens=2), output_ids=(1, 2))

    with pytest.raises(InvalidRequest, match="max_tokens: 2 tokens of 2 are there already"):
        engine(FakeRunner()).submit(request)


def test_prompt_logprobs_come_whole_with_the_first_token_whatever_the_chunks() -> None:
    for max_chunk_tokens in (0, 1, 3, 5, 7):
        world = engine(FakeRunner(), max_chunk_tokens=max_chunk_tokens)
        world.submit(prompt(7, max_tokens=2, num_prompt_logprobs=0))

        first, second = outputs(run(world))

        assert first.prompt_logprobs is not None
        assert [entry and entry.logprob for entry in first.prompt_logprobs] == [
            None, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0,
        ]  # fmt: skip
        assert second.prompt_logprobs is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (prompt(0), "prompt: it is empty"),
        (toys.request((1, -1)), "prompt: token ids are from 0 to 96"),
        (toys.request((1, VOCAB_SIZE)), "prompt: token ids are from 0 to 96"),
        (prompt(1, logit_bias=((VOCAB_SIZE, 1.0),)), "logit_bias: token ids are from 0 to 96"),
    ],
)
def test_what_the_model_cannot_read_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine(FakeRunner()).submit(request_)


def test_what_can_never_fit_the_pool_is_refused_at_once_and_blocks_nobody() -> None:
    world = engine(FakeRunner(block_tokens=16), num_blocks=8, block_tokens=16)

    with pytest.raises(PromptTooLong, match="204 tokens are more than the 129 that fit") as submitted:
        world.submit(prompt(200))
    with pytest.raises(PromptTooLong):
        world.reserve(prompt(200))
    for i in range(10):
        world.submit(prompt(10, request_id=f"small{i}"))

    assert (submitted.value.needed_tokens, submitted.value.limit_tokens) == (204, 129)
    assert len(outputs(run(world))) == 40


def test_the_last_token_fits_beside_a_full_pool() -> None:
    world = engine(FakeRunner(), num_blocks=2, block_tokens=4)
    world.submit(prompt(5, max_tokens=4))

    with pytest.raises(PromptTooLong):
        world.submit(prompt(5, max_tokens=5))
    assert len(outputs(run(world))) == 4


def test_the_context_of_the_model_counts_prompt_and_answer() -> None:
    world = engine(FakeRunner(), num_blocks=100, max_model_tokens=20)

    world.submit(prompt(16, max_tokens=4))

    with pytest.raises(PromptTooLong, match="21 tokens are more than the 20 that fit"):
        world.submit(prompt(17, max_tokens=4))


def test_a_prompt_that_decodes_elsewhere_needs_room_for_itself_only() -> None:
    world = engine(FakeRunner(), num_blocks=2, block_tokens=4)
    sequence = world.submit(prompt(8, max_tokens=1000), has_destination=True)

    run(world)

    assert (sequence.status, len(sequence.blocks)) == (SequenceStatus.SENDING, 2)
    with pytest.raises(PromptTooLong):
        world.submit(prompt(9), has_destination=True)


def test_a_full_line_refuses_the_next_one() -> None:
    world = engine(FakeRunner(), max_waiting=2)
    world.submit(prompt(1, request_id="a"))
    world.submit(prompt(1, request_id="b"))

    with pytest.raises(QueueFull, match="2 sequences wait already"):
        world.submit(prompt(1, request_id="c"))


def test_an_unknown_policy_is_found_at_the_start() -> None:
    with pytest.raises(ConfigError, match="sjf is none of"):
        engine(FakeRunner(), policy="sjf")


def test_a_reservation_takes_all_its_blocks_or_none() -> None:
    world = engine(FakeRunner(), num_blocks=5)
    first = world.reserve(prompt(8))

    with pytest.raises(NoFreeBlocks, match="need 3 KV blocks, 2 of 5 are free"):
        world.reserve(prompt(8))

    assert len(first.blocks) == 3  # 8 tokens and the next one
    assert world.counts().owned == 3


def test_a_reserved_sequence_goes_on_after_the_first_token() -> None:
    runner = FakeRunner()
    world = engine(runner)
    request = prompt(7, max_tokens=5)
    sequence, first = reserved(world, runner, request)

    assert run(world) == []
    world.arrived(sequence, first)
    answer = outputs(run(world))

    assert [first.token_id, *(output.token_id for output in answer)] == expected_output(request)
    assert [output.index for output in answer] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": 1}, "first: token 1 of the answer came, 0 is next"),
        ({"finish": FinishReason.STOP}, "first: no token can follow it"),
        ({"token_id": VOCAB_SIZE}, "first: 97 is not in the vocabulary"),
    ],
)
def test_a_first_token_that_cannot_be_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    runner = FakeRunner()
    world = engine(runner)
    sequence, first = reserved(world, runner, prompt(7))

    with pytest.raises(InternalError, match=message):
        world.arrived(sequence, replace(first, **change))

    assert sequence.status is SequenceStatus.RECEIVING


def test_kv_that_arrives_after_the_end_changes_nothing() -> None:
    runner = FakeRunner()
    world = engine(runner)
    sequence, first = reserved(world, runner, prompt(7))
    world.abort(sequence)

    with pytest.raises(RequestCancelled, match="the reservation is over, the sequence is draining"):
        world.arrived(sequence, first)

    assert run(world) == []


def test_kv_that_arrives_after_the_deadline_is_told_so() -> None:
    runner, clock = FakeRunner(), ManualClock()
    world = engine(runner, clock=clock)
    sequence, first = reserved(world, runner, prompt(7, timeout_s=5.0))
    clock.advance(5.0)
    world.step()

    with pytest.raises(DeadlineExceeded, match="5 s are over, the KV came too late"):
        world.arrived(sequence, first)


@pytest.mark.parametrize("status", ["waiting", "prefilling", "decoding"])
def test_an_aborted_sequence_gives_its_blocks_back_at_once(status: str) -> None:
    world = engine(FakeRunner(), max_chunk_tokens=4)
    sequence = world.submit(prompt(6))
    for _ in range(["waiting", "prefilling", "decoding"].index(status)):
        world.step()
    assert sequence.status.value == status

    world.abort(sequence)
    world.abort(sequence)

    assert sequence.status is SequenceStatus.FINISHED
    assert nothing_is_held(world.counts())
    assert world.counters["aborted"] == 1
    assert not world.has_work


@pytest.mark.parametrize("status", ["prefilling", "sending", "receiving"])
def test_an_aborted_sequence_under_a_transfer_keeps_its_blocks_until_it_is_drained(status: str) -> None:
    world = engine(FakeRunner(), max_chunk_tokens=4)
    if status == "receiving":
        sequence = world.reserve(prompt(7))
    else:
        sequence = world.submit(prompt(8), has_destination=True)
        for _ in range(["waiting", "prefilling", "sending"].index(status)):
            world.step()
    assert sequence.status.value == status

    world.abort(sequence)
    after_abort = world.counts()
    world.drained(sequence)
    world.drained(sequence)

    assert (after_abort.draining, after_abort.owned) == (2, 0)
    assert nothing_is_held(world.counts())
    assert sequence.status is SequenceStatus.FINISHED


def test_a_first_token_that_ends_the_answer_leaves_a_draining_sequence() -> None:
    world = engine(FakeRunner())
    sequence = world.submit(prompt(8, max_tokens=1), has_destination=True)

    (output,) = outputs(run(world))

    assert output.finish is FinishReason.LENGTH
    assert sequence.status is SequenceStatus.DRAINING
    assert world.counts().draining == 2


def test_drained_leaves_a_decoding_sequence_alone() -> None:
    runner = FakeRunner()
    world = engine(runner)
    sequence, first = reserved(world, runner, prompt(7))
    world.arrived(sequence, first)

    world.drained(sequence)

    assert sequence.status is SequenceStatus.DECODING
    assert len(outputs(run(world))) == 3


@pytest.mark.parametrize("status", ["waiting", "prefilling", "decoding", "sending", "receiving"])
def test_a_deadline_ends_a_sequence_wherever_it_is(status: str) -> None:
    clock = ManualClock()
    world = engine(FakeRunner(), clock=clock, max_chunk_tokens=4)
    if status == "receiving":
        sequence = world.reserve(prompt(7, timeout_s=5.0))
    else:
        sequence = world.submit(prompt(7, timeout_s=5.0), has_destination=status == "sending")
        num_steps = {"waiting": 0, "prefilling": 1}.get(status, 2)
        for _ in range(num_steps):
            world.step()
    assert sequence.status.value == status

    clock.advance(4.9)
    assert world.step().failed == ()
    clock.advance(0.1)
    ((failed, error),) = world.step().failed

    assert failed is sequence
    assert isinstance(error, DeadlineExceeded)
    assert "5 s are over" in str(error)
    assert sequence.status.value == ("draining" if status in ("sending", "receiving") else "finished")
    assert world.step().failed == ()


def test_each_sequence_has_its_own_deadline() -> None:
    clock = ManualClock()
    world = engine(FakeRunner(), clock=clock)
    late, early, middle = (
        world.reserve(prompt(3, request_id=f"r{i}", timeout_s=timeout_s))
        for i, timeout_s in enumerate((9.0, 5.0, 7.0))
    )

    ended = []
    for _ in range(10):
        clock.advance(1.0)
        ended += [(clock.now_s(), sequence) for sequence, _ in world.step().failed]

    assert ended == [(5.0, early), (7.0, middle), (9.0, late)]


def test_a_deadline_needs_no_traffic() -> None:
    clock = ManualClock()
    world = engine(FakeRunner(), clock=clock, num_blocks=4)
    reservations = [world.reserve(prompt(7, request_id=f"r{i}", timeout_s=5.0)) for i in range(2)]
    clock.advance(5.0)

    failed = [sequence for sequence, _ in world.step().failed]
    for sequence in failed:
        world.drained(sequence)

    assert failed == reservations
    assert nothing_is_held(world.counts())


def test_an_item_that_fails_ends_alone() -> None:
    errors: dict[str, ServingError] = {"bad": InvalidRequest("logit_bias", "it is wrong")}
    world = engine(FakeRunner(item_errors=errors))
    good = prompt(5, request_id="good")
    world.submit(prompt(5, request_id="bad"))
    world.submit(good)

    events = run(world)

    assert [event for request_id, event in events if request_id == "bad"] == [errors["bad"]]
    assert [output.token_id for output in outputs(events)] == expected_output(good)
    assert nothing_is_held(world.counts())


def test_a_step_that_breaks_ends_its_batch_and_not_the_engine() -> None:
    def break_on(plan: BatchPlan) -> None:
        if any(item.sequence.request.request_id == "bad" for item in plan.items):
            raise ZeroDivisionError("broken kernel")

    world = engine(FakeRunner(before_step=break_on), max_sequences=1, max_batch_tokens=64)
    bad = world.submit(prompt(5, request_id="bad"), has_destination=True)
    good = prompt(5, request_id="good")
    world.submit(good)

    events = run(world)

    assert events[0][0] == "bad"
    assert isinstance(events[0][1], InternalError)
    assert str(events[0][1]) == "the step failed: ZeroDivisionError"
    assert bad.status is SequenceStatus.DRAINING  # what a layer gave out may still be read
    assert [output.token_id for output in outputs(events)] == expected_output(good)


def test_written_layers_are_told_for_sequences_that_leave_and_for_no_others() -> None:
    world = engine(FakeRunner(num_layers=2), max_chunk_tokens=5)
    leaving = world.submit(prompt(8), has_destination=True)
    world.submit(prompt(8, request_id="stays"))
    written: list[tuple[int, tuple[tuple[SequenceState, int], ...]]] = []

    for _ in range(4):
        world.step(lambda layer, progress: written.append((layer, progress)))

    assert written == [
        (0, ((leaving, 5),)),
        (1, ((leaving, 5),)),
        (0, ((leaving, 8),)),
        (1, ((leaving, 8),)),
    ]


def test_many_aborts_leave_nothing() -> None:
    world = World(num_blocks=12, block_tokens=4, eos_ids=frozenset(), max_chunk_tokens=3)
    for i in range(300):
        world.submit(prompt(9, request_id=f"r{i}"), has_destination=i % 3 == 0)
        if i % 4:
            world.step()
        for life in world.lives[-3:]:
            world.abort(life)
            world.drain(life)

    assert world.engine.num_sequences == 0
    assert world.engine.num_free_blocks == 12
