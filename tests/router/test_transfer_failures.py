"""Failed transfers under each policy: the same tokens or one typed error at once, counted and told."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from router.config import Fallback, OnTransferFailure
from tests.patience import eventually
from tests.router.fakes import FakeWorker, World, answer, disaggregated, fast_config, running
from tests.router.test_books import samples
from tests.toys import layout, request
from twinpool.core.errors import (
    NoFreeBlocks,
    ServingError,
    TransferDamaged,
    TransferError,
    TransferRefused,
    TransferTimeout,
    WorkerLost,
)
from twinpool.core.ports import Role
from twinpool.core.ticket import Endpoint
from twinpool.core.timeline import RequestTimeline

QUESTION = request(tuple(range(5, 42)), max_tokens=8)
RETRY, RECOMPUTE, FAIL = OnTransferFailure
ERRORS = [TransferTimeout("2 s without a frame"), TransferDamaged("frame 3"), TransferRefused("no route")]


def two_by_two(policy: OnTransferFailure, **changes: object) -> World:
    return disaggregated(fast_config(on_transfer_failure=policy, **changes), num_prefill=2, num_decode=2)


def fail_once(world: World, phase: str, error: ServingError) -> list[FakeWorker]:
    """Let the first worker that comes to ``phase`` raise ``error``; return who did."""
    failed: list[FakeWorker] = []
    for worker in world.all_workers:

        async def hook(worker: FakeWorker = worker) -> None:
            if not failed:
                failed.append(worker)
                raise error

        worker.hooks[phase] = hook
    return failed


def events(timeline: RequestTimeline, name: str) -> list[dict[str, Any]]:
    return [event.detail for event in timeline.events if event.name == name]


def called(world: World, phase: str) -> list[str]:
    return [worker.info.worker_id for worker in world.all_workers for call in worker.calls if call == phase]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("phase", ["prefill", "resume"])
def test_another_pair_tries_again_if_there_is_one(phase: str, error: TransferError) -> None:
    async def main() -> None:
        async with running(two_by_two(RETRY)) as world:
            fail_once(world, phase, error)
            timeline = world.timeline(QUESTION)
            assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
            assert called(world, "generate") == []
            assert sorted(called(world, "prefill")) == ["prefill-0", "prefill-1"]
            assert sorted(called(world, "reserve")) == ["decode-0", "decode-1"]
            assert timeline.path == "disaggregated"
            assert_told(world, timeline, RETRY, error)
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("fallback", list(Fallback))
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("phase", ["prefill", "resume"])
def test_the_same_decode_worker_computes_it_again_alone(
    phase: str, error: TransferError, fallback: Fallback
) -> None:
    async def main() -> None:
        async with running(two_by_two(RECOMPUTE, fallback=fallback)) as world:
            fail_once(world, phase, error)
            timeline = world.timeline(QUESTION)
            assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
            assert called(world, "generate") == called(world, "reserve")
            assert len(called(world, "prefill")) == len(called(world, "reserve")) == 1
            assert timeline.path == "local"
            assert events(timeline, "recompute") == [{"reason": type(error).__name__}]
            assert samples(world)["twinpool_fallbacks_total", ("transfer_failed",)] == 1
            assert_told(world, timeline, RECOMPUTE, error)
            world.assert_at_rest()

    asyncio.run(main())


def test_a_decode_worker_that_is_gone_recomputes_nothing() -> None:
    async def main() -> None:
        async with running(two_by_two(RECOMPUTE)) as world:

            async def fail_and_die(worker: FakeWorker) -> None:
                if len(called(world, "resume")) == 1:
                    asyncio.get_running_loop().call_soon(worker.die)
                    raise TransferDamaged("frame 3")

            for worker in world.all_workers:
                worker.hooks["resume"] = lambda worker=worker: fail_and_die(worker)  # type: ignore[misc]
            timeline = world.timeline(QUESTION)
            assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
            assert (called(world, "generate"), timeline.path) == ([], "disaggregated")
            assert events(timeline, "recompute") == []
            world.assert_at_rest()

    asyncio.run(main())


def test_a_recomputation_waits_for_room_on_its_worker() -> None:
    async def main() -> None:
        world = two_by_two(RECOMPUTE)  # no heart beats by itself
        fail_once(world, "resume", TransferTimeout("late"))
        refused = fail_once(world, "generate", NoFreeBlocks(needed=3, free=1, total=32))
        asking = asyncio.create_task(world.ask(QUESTION))
        await eventually(lambda: world.router.num_queued == 1)
        await asyncio.sleep(0.05)
        assert called(world, "generate") == [refused[0].info.worker_id]
        world.beat()
        assert await asking == answer(QUESTION)
        assert called(world, "generate") == [refused[0].info.worker_id] * 2
        assert called(world, "reserve") == [refused[0].info.worker_id]
        world.assert_at_rest()

    asyncio.run(main())


def test_only_the_attempt_after_a_failed_transfer_is_recomputed() -> None:
    async def main() -> None:
        async with running(two_by_two(RECOMPUTE)) as world:
            fail_once(world, "resume", TransferTimeout("late"))
            fail_once(world, "generate", WorkerLost("decode-0", "connection reset"))
            timeline = world.timeline(QUESTION)
            assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
            assert [event["reason"] for event in events(timeline, "retry")] == [
                "TransferTimeout",
                "WorkerLost",
            ]
            assert len(events(timeline, "recompute")) == 1
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("phase", "num_sent"), [("prefill", 0), ("resume", 1)])
def test_the_client_is_told_at_once_and_nothing_is_computed_again(
    phase: str, num_sent: int, error: TransferError
) -> None:
    async def main() -> None:
        async with running(two_by_two(FAIL)) as world:
            fail_once(world, phase, error)
            timeline = world.timeline(QUESTION)
            received = []
            with pytest.raises(type(error), match=str(error)):
                async for output in world.router.generate(QUESTION, timeline):
                    received.append(output.token_id)
            assert received == answer(QUESTION)[:num_sent]
            assert len(called(world, "prefill")) == 1
            assert called(world, "generate") == []
            assert (events(timeline, "retry"), timeline.outcome) == ([], type(error).__name__)
            assert_told(world, timeline, FAIL, error, is_retried=False)
            world.assert_at_rest()

    asyncio.run(main())


def test_a_lost_worker_is_no_failed_transfer() -> None:
    async def main() -> None:
        async with running(two_by_two(FAIL)) as world:
            lost: list[str] = []

            async def die_once(worker: FakeWorker) -> None:
                if not lost:
                    lost.append(worker.info.worker_id)
                    worker.die()

            for worker in world.all_workers[:2]:
                worker.hooks["prefill"] = lambda worker=worker: die_once(worker)  # type: ignore[misc]
            assert await world.ask(QUESTION) == answer(QUESTION)
            assert len(lost) == 1
            assert not [name for name, _ in samples(world) if "transfer_failures" in name]

    asyncio.run(main())


def test_attempts_have_an_end_under_every_policy() -> None:
    async def main() -> None:
        for policy in (RETRY, RECOMPUTE):
            config = fast_config(on_transfer_failure=policy, fallback=Fallback.REFUSE, max_attempts=2)
            async with running(disaggregated(config)) as world:

                async def refuse() -> None:
                    raise TransferRefused("no route")

                for phase in ("prefill", "generate"):
                    for worker in world.all_workers:
                        worker.hooks[phase] = refuse
                with pytest.raises(TransferRefused):
                    await world.ask(QUESTION)
                assert len(called(world, "prefill") + called(world, "generate")) == 2
                world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(
    "forged",
    [
        {"ranks": ((Endpoint("grpc", "attacker:1"),),)},
        {"ranks": ()},
        {"ranks": ((Endpoint("shm", "/decode-0.0"), Endpoint("grpc", "fake:0.0")),) * 2},
        {"ranks": ((Endpoint("shm", "/decode-0.0"), Endpoint("tcp", "fake:0.0")),)},
        {"layout": layout(block_tokens=8)},
        {"layout": layout(tp_size=2)},
        {"sender_id": "prefill-1"},
        {"worker_id": "decode-1"},
        {"epoch": 2},
        {"request_id": "another"},
    ],
)
def test_a_ticket_that_names_what_its_worker_did_not_is_never_used(forged: dict[str, Any]) -> None:
    async def main() -> None:
        async with running(disaggregated(num_decode=2)) as world:
            forger = world.workers["decode-0"]
            forger.forged = forged
            for _ in range(3):
                timeline = world.timeline(QUESTION)
                assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
                assert timeline.path == "disaggregated", "the prefill worker is not to blame"
            name = next(iter(forged))
            told = [event for event in events(timeline, "retry") if f"has another {name}" in event["error"]]
            num_refused = forger.calls.count("reserve")
            assert num_refused >= 1
            assert len(told) == len(events(timeline, "retry"))
            assert {ticket.worker_id for ticket in world.workers["prefill-0"].tickets} == {"decode-1"}
            assert len(world.workers["prefill-0"].tickets) == 3
            counted = samples(world)[
                "twinpool_transfer_failures_total", ("retry_other_pair", "TransferRefused")
            ]
            assert counted == num_refused
            world.assert_at_rest()

    asyncio.run(main())


def test_a_forged_ticket_ends_the_answer_where_transfers_may_not_fail() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(on_transfer_failure=FAIL))) as world:
            world.workers["decode-0"].forged = {"ranks": ((Endpoint("grpc", "attacker:1"),),)}
            with pytest.raises(TransferRefused, match=r"decode-0 has another ranks: .*attacker:1"):
                await world.ask(QUESTION)
            assert world.workers["prefill-0"].calls == []
            world.assert_at_rest()

    asyncio.run(main())


def test_each_pair_has_a_book_on_its_transfers_that_ends_with_either_life() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(on_transfer_failure=FAIL), num_prefill=2)) as world:
            for _ in range(4):
                await world.ask(QUESTION)
            fail_once(world, "resume", TransferTimeout("late"))
            with pytest.raises(TransferTimeout):
                await world.ask(QUESTION)

            (decode,) = (handle for handle in world.pool.handles if handle.info.role is Role.DECODE)
            books = decode.exchanges
            assert {name: book.last_transport for name, book in books.items()} == {
                "prefill-0": "shm",
                "prefill-1": "shm",
            }
            # Whether KV arrived is what the decode worker says: here, that of the failed one too.
            assert sorted(book.transfers["shm"] for book in books.values()) == [2, 3]
            assert sorted(book.failures["TransferTimeout"] for book in books.values()) == [0, 1]
            assert samples(world)["twinpool_transfers_total", ("shm",)] == 5

            world.join(Role.PREFILL, number=0, generation=2)
            assert list(decode.exchanges) == ["prefill-1"]
            world.workers["prefill-1"].die()
            assert decode.exchanges == {}

    asyncio.run(main())


def test_the_transfer_in_a_timeline_says_how_the_kv_came() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            timeline = world.timeline(QUESTION)
            await world.ask_with(QUESTION, timeline)
            (span,) = (span for span in timeline.spans if span.name == "transfer")
            assert span.detail["transport"] == "shm"

    asyncio.run(main())


@pytest.mark.parametrize("policy", list(OnTransferFailure))
@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random_give_the_exact_tokens_or_a_typed_error(
    policy: OnTransferFailure, seed: int
) -> None:
    chance = random.Random(seed)
    raised: list[str] = []

    async def sometimes_fail() -> None:
        if chance.random() < 0.2:
            error = chance.choice(ERRORS)
            raised.append(type(error).__name__)
            raise error

    async def ask(world: World) -> str:
        question = request(tuple(chance.randrange(999) for _ in range(20)), max_tokens=6)
        try:
            got = await world.ask(question)
        except TransferError as error:
            return type(error).__name__
        assert got == answer(question)
        return "exact"

    async def main() -> None:
        async with running(two_by_two(policy)) as world:
            for worker in world.all_workers:
                worker.hooks["prefill"] = worker.hooks["resume"] = sometimes_fail
            results: list[str] = []
            for _ in range(20):
                results += await asyncio.gather(*(ask(world) for _ in range(10)))
            failures = {
                labels[1]: value
                for (name, labels), value in samples(world).items()
                if name == "twinpool_transfer_failures_total" and labels[0] == policy
            }
            assert failures == {name: raised.count(name) for name in set(raised)}
            num_errors = len(results) - results.count("exact")
            assert num_errors == len(raised) if policy is FAIL else num_errors < len(raised)
            if policy is RECOMPUTE:
                assert num_errors == 0
            await eventually(lambda: world.router.num_in_flight == 0)
            world.assert_at_rest()

    asyncio.run(main())


def assert_told(
    world: World,
    timeline: RequestTimeline,
    policy: OnTransferFailure,
    error: TransferError,
    *,
    is_retried: bool = True,
) -> None:
    """The failure is counted once, with policy and reason, and stands in the timeline."""
    reason = type(error).__name__
    (told,) = events(timeline, "transfer_failed")
    assert {"reason": reason, "policy": policy, "error": str(error)}.items() <= told.items()
    assert (told["prefill_worker"], told["decode_worker"]) in {
        (f"prefill-{i}", f"decode-{j}") for i in range(2) for j in range(2)
    }
    values = samples(world)
    assert values["twinpool_transfer_failures_total", (policy, reason)] == 1
    assert values.get(("twinpool_retries_total", (reason,)), 0) == is_retried
