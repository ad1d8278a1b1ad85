"""Workers that die, freeze or refuse in every phase: the same tokens or one error, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress

import pytest

from router.config import Fallback
from router.workers import WorkerState
from tests.patience import eventually
from tests.router.fakes import FakeWorker, World, answer, colocated, disaggregated, fast_config, running
from tests.toys import request
from twinpool.core.errors import (
    InternalError,
    NoWorkers,
    RequestCancelled,
    ServingError,
    TransferDamaged,
    TransferRefused,
    WorkerDraining,
    WorkerLost,
)
from twinpool.core.ports import Role
from twinpool.core.request import Request

PROMPT = tuple(range(5, 42))
QUESTION = request(PROMPT, max_tokens=8)
DECODE_PHASES = ["reserve", "reserved", "resume", "token", "release"]
PREFILL_PHASES = ["prefill", "prefilled"]


def once(world: World, role: Role, phase: str, what: str, *, after: int = 1) -> list[FakeWorker]:
    """Let the first worker of ``role`` that comes to ``phase`` for the ``after``-th time do ``what``."""
    hit: list[FakeWorker] = []
    for worker in world.all_workers:
        if worker.info.role is role:

            async def hook(worker: FakeWorker = worker) -> None:
                if not hit and worker.calls.count(phase) == after:
                    hit.append(worker)
                    getattr(worker, what)()

            worker.hooks[phase] = hook
    return hit


@pytest.mark.parametrize("what", ["die", "freeze"])
@pytest.mark.parametrize(
    ("role", "phase"),
    [(Role.DECODE, phase) for phase in DECODE_PHASES] + [(Role.PREFILL, phase) for phase in PREFILL_PHASES],
)
def test_losing_a_worker_in_any_phase_changes_no_token(role: Role, phase: str, what: str) -> None:
    async def main() -> None:
        async with running(disaggregated(num_prefill=2, num_decode=2)) as world:
            hit = once(world, role, phase, what)
            asking = [asyncio.create_task(world.ask(QUESTION)) for _ in range(3)]
            for each in asking:
                assert await each == answer(QUESTION)
            assert len(hit) == 1, "the fault did not happen"
            assert_survivors_at_rest(world, hit)

    asyncio.run(main())


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 6])
def test_a_decode_worker_that_dies_after_some_tokens_is_continued_exactly(num_tokens: int) -> None:
    async def main() -> None:
        async with running(disaggregated(num_decode=2)) as world:
            hit = once(world, Role.DECODE, "token", "die", after=num_tokens)
            timeline = world.timeline(QUESTION)
            assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
            retries = [event.detail for event in timeline.events if event.name == "retry"]
            assert [(r["reason"], r["num_sent"]) for r in retries] == [("WorkerLost", num_tokens)]
            assert timeline.decode_worker != hit[0].info.worker_id
            assert 'twinpool_retries_total{reason="WorkerLost"} 1.0' in world.router.metrics.render().decode()
            assert_survivors_at_rest(world, hit)

    asyncio.run(main())


def test_a_prefill_worker_that_dies_with_kv_still_to_send_costs_no_lease() -> None:
    async def main() -> None:
        async with running(disaggregated(num_prefill=2)) as world:
            killed: list[FakeWorker] = []

            async def kill_sender() -> None:
                if killed:
                    return
                sender = next(w for w in world.all_workers if "prefill" in w.calls)
                killed.append(sender)
                for reservation in world.workers["decode-0"].reservations.values():
                    reservation.arrived.clear()  # the tail is still on its way, and never comes
                sender.die()

            world.workers["decode-0"].hooks["resume"] = kill_sender
            assert await asyncio.wait_for(world.ask(QUESTION), 10.0) == answer(QUESTION)
            assert len(killed) == 1
            assert_survivors_at_rest(world, killed)

    asyncio.run(main())


def test_a_decode_worker_that_dies_while_the_prompt_is_computed_ends_the_attempt_at_once() -> None:
    async def main() -> None:
        async with running(disaggregated(num_decode=2)) as world:
            prefill = world.workers["prefill-0"]

            async def kill_holder_and_stall() -> None:
                if prefill.calls.count("prefill") == 1:
                    next(w for w in world.all_workers if w.reservations).die()
                    await prefill.stall()

            prefill.hooks["prefill"] = kill_holder_and_stall
            assert await asyncio.wait_for(world.ask(QUESTION), 10.0) == answer(QUESTION)
            assert prefill.calls.count("prefill") == 2
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("error", [WorkerLost("colocated-0", "reset"), WorkerDraining("its drain is over")])
def test_an_attempt_that_ran_for_long_does_not_use_up_the_patience_of_the_next(error: ServingError) -> None:
    async def main() -> None:
        async with running(colocated(fast_config(queue_timeout_s=0.3))) as world:
            worker = world.workers["colocated-0"]

            async def fail_late() -> None:
                if worker.calls.count("token") == 3:
                    await asyncio.sleep(0.4)
                    raise error

            worker.hooks["token"] = fail_late
            assert await world.ask(QUESTION) == answer(QUESTION)
            world.assert_at_rest()

    asyncio.run(main())


def test_the_only_prefill_worker_dies_and_the_decode_worker_finishes_alone() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            once(world, Role.PREFILL, "prefill", "die")
            timeline = world.timeline(QUESTION)
            assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
            assert timeline.path == "local"
            assert [e.name for e in timeline.events] == ["retry", "fallback", "first_token"]
            world.assert_at_rest()

    asyncio.run(main())


def test_the_only_decode_worker_dies_and_its_successor_goes_on() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            hit = once(world, Role.DECODE, "token", "die", after=3)
            lost = asyncio.Event()
            world.pool.subscribe(lambda: lost.set() if world.pool.get("decode-0") is None else None)
            asking = asyncio.create_task(world.ask(QUESTION))
            await lost.wait()
            await asyncio.sleep(0.05)
            assert len(hit) == 1
            assert not asking.done()
            assert (world.router.num_queued, world.router.num_in_flight) == (1, 0)
            world.join(Role.DECODE, generation=2)
            assert await asking == answer(QUESTION)
            world.assert_at_rest()

    asyncio.run(main())


def test_workers_that_give_way_to_successors_cost_no_attempts() -> None:
    """A Ray that is started again replaces every worker: more of them than an answer has attempts."""

    async def main() -> None:
        async with running(disaggregated(fast_config(max_attempts=1))) as world:
            long = request(PROMPT, max_tokens=40)
            world.workers["decode-0"].hooks["token"] = lambda: asyncio.sleep(0.01)
            asking = asyncio.create_task(world.ask(long))
            for generation in range(2, 6):
                await asyncio.sleep(0.03)
                for role in (Role.PREFILL, Role.DECODE):
                    earlier = world.workers[f"{role}-0"]
                    successor = world.join(role, generation=generation)
                    earlier.is_dead = True  # it ends when it hears of its successor
                    successor.hooks["token"] = lambda: asyncio.sleep(0.01)
            assert await asking == answer(long)
            assert 'twinpool_retries_total{reason="WorkerLost"}' in world.router.metrics.render().decode()
            world.assert_at_rest()

    asyncio.run(main())


def test_without_a_successor_in_time_the_client_is_told() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(queue_timeout_s=0.1))) as world:
            once(world, Role.DECODE, "token", "die", after=3)
            received = []
            with pytest.raises(NoWorkers):
                async for output in world.router.generate(QUESTION, world.timeline(QUESTION)):
                    received.append(output.token_id)
            assert received == answer(QUESTION)[:3]
            world.assert_at_rest()

    asyncio.run(main())


def test_a_worker_that_says_it_is_lost_and_speaks_again_is_asked_again_after_it_spoke() -> None:
    async def main() -> None:
        async with running(colocated()) as world:
            worker = world.workers["colocated-0"]

            async def break_once() -> None:
                if worker.calls.count("token") == 3:
                    raise WorkerLost("colocated-0", "connection reset")

            worker.hooks["token"] = break_once
            assert await world.ask(QUESTION) == answer(QUESTION)
            assert worker.calls.count("generate") == 2
            world.assert_at_rest()

    asyncio.run(main())


def test_a_worker_that_failed_is_not_asked_again_before_it_spoke() -> None:
    async def main() -> None:
        world = colocated()  # no heart beats by itself
        worker = world.workers["colocated-0"]

        async def refuse_connections() -> None:
            raise WorkerLost("colocated-0", "connection refused")

        worker.hooks["generate"] = refuse_connections
        asking = asyncio.create_task(world.ask(QUESTION))
        await eventually(lambda: world.router.num_queued == 1)
        await asyncio.sleep(0.05)
        assert worker.calls == ["generate"]
        worker.hooks.clear()
        world.beat()
        assert await asking == answer(QUESTION)

    asyncio.run(main())


def test_a_frozen_worker_is_noticed_avoided_and_used_again_when_it_speaks() -> None:
    async def main() -> None:
        async with running(disaggregated(num_decode=2)) as world:
            frozen = world.workers["decode-0"]
            frozen.freeze()
            await world.until("decode-0", WorkerState.FROZEN)
            before = len(frozen.calls)
            assert await asyncio.gather(*(world.ask(QUESTION) for _ in range(4))) == [answer(QUESTION)] * 4
            assert len(frozen.calls) == before
            frozen.thaw()
            await world.until("decode-0", WorkerState.READY)
            await asyncio.gather(*(world.ask(QUESTION) for _ in range(4)))
            assert len(frozen.calls) > before
            world.assert_at_rest()

    asyncio.run(main())


def test_freezing_the_only_decode_worker_makes_the_router_not_ready_until_it_speaks() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            world.workers["decode-0"].freeze()
            await world.until("decode-0", WorkerState.FROZEN)
            assert not world.router.is_ready
            world.workers["decode-0"].thaw()
            assert await world.pool.wait_ready(timeout_s=10.0)
            assert await world.ask(QUESTION) == answer(QUESTION)

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        TransferDamaged("frame 3 is damaged"),
        TransferRefused("no such transfer"),
        RequestCancelled("the worker stops"),
    ],
)
def test_kv_that_did_not_arrive_is_prefilled_again(error: ServingError) -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            decode = world.workers["decode-0"]

            async def fail_once() -> None:
                if decode.calls.count("resume") == 1:
                    raise error

            decode.hooks["resume"] = fail_once
            assert await world.ask(QUESTION) == answer(QUESTION)
            assert sum(w.calls.count("prefill") + w.calls.count("generate") for w in world.all_workers) == 2
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_two_workers_that_cannot_reach_each_other_cost_one_attempt(role: Role) -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:

            async def fail() -> None:
                raise TransferRefused("no route between them")

            worker = world.workers[f"{role}-0"]
            worker.hooks["prefill" if role is Role.PREFILL else "resume"] = fail
            for _ in range(4):  # in whatever order the two speak
                timeline = world.timeline(QUESTION)
                assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
                assert timeline.path == "local"
                assert [e.name for e in timeline.events].count("retry") == 1
            world.assert_at_rest()

    asyncio.run(main())


def test_two_workers_that_cannot_reach_each_other_end_the_answer_where_only_pairs_may_serve() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(fallback=Fallback.REFUSE))) as world:

            async def fail() -> None:
                raise TransferRefused("no route between them")

            world.workers["prefill-0"].hooks["prefill"] = fail
            with pytest.raises(TransferRefused, match="no route"):
                await world.ask(QUESTION)
            assert world.workers["prefill-0"].calls.count("prefill") == world.router.config.max_attempts
            world.assert_at_rest()

    asyncio.run(main())


def test_a_token_out_of_order_ends_the_answer_with_a_typed_error() -> None:
    async def main() -> None:
        async with running(colocated()) as world:
            worker = world.workers["colocated-0"]
            whole = worker.generate

            async def skip_one(request: Request):  # type: ignore[no-untyped-def]
                async with aclosing(whole(request)) as outputs:
                    async for output in outputs:
                        if output.index != 2:
                            yield output

            worker.generate = skip_one  # type: ignore[method-assign]
            with pytest.raises(InternalError, match="output 3 came where 2 follows"):
                await world.ask(QUESTION)
            world.assert_at_rest()

    asyncio.run(main())


def test_a_bug_in_a_port_ends_one_request_and_frees_what_it_held() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:

            async def bug() -> None:
                raise KeyError("oops")

            world.workers["decode-0"].hooks["token"] = bug
            with pytest.raises(KeyError):
                await world.ask(QUESTION)
            world.assert_at_rest()

    asyncio.run(main())


def test_all_dead_gives_one_error_and_no_further_attempt() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(queue_timeout_s=0.1), num_decode=3)) as world:
            for worker in world.all_workers:
                if worker.info.role is Role.DECODE:

                    async def die(worker: FakeWorker = worker) -> None:
                        worker.die()

                    worker.hooks["reserve"] = die
            with pytest.raises(ServingError):
                await world.ask(QUESTION)
            tried = sum(worker.calls.count("reserve") for worker in world.all_workers)
            assert tried == 3
            await asyncio.sleep(0.05)
            assert sum(worker.calls.count("reserve") for worker in world.all_workers) == tried
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_300_disconnects_and_100_errors_at_random_leave_every_counter_at_zero(seed: int) -> None:
    chance = random.Random(seed)

    async def leave(world: World) -> None:
        question = request(
            tuple(chance.randrange(1000) for _ in range(chance.randrange(1, 60))),
            max_tokens=chance.randrange(1, 30),
        )
        if chance.random() < 0.5:
            asking = asyncio.create_task(world.ask(question))
            for _ in range(chance.randrange(60)):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            return
        async with aclosing(world.router.generate(question, world.timeline(question))) as outputs:
            for _ in range(chance.randrange(question.sampling.max_tokens + 1)):
                await anext(outputs)

    async def fail(world: World) -> None:
        world.all_workers[chance.randrange(4)].hooks[
            chance.choice(["reserve", "prefill", "resume", "token"])
        ] = lambda: upstream_error(chance)
        with suppress(ServingError):
            await world.ask(QUESTION)

    async def main() -> None:
        async with running(
            disaggregated(fast_config(max_queued=1000, queue_timeout_s=0.5), num_prefill=2, num_decode=2)
        ) as world:
            work = [leave(world) for _ in range(300)] + [fail(world) for _ in range(100)]
            chance.shuffle(work)
            while work:
                results = await asyncio.gather(*work[:40], return_exceptions=True)
                work = work[40:]
                assert all(r is None or isinstance(r, ServingError) for r in results), results
            for worker in world.all_workers:
                worker.hooks.clear()
            assert len(world.router._tasks) == 0
            world.assert_at_rest()
            text = world.router.metrics.render().decode()
            assert "twinpool_queued_requests 0.0" in text
            assert "twinpool_in_flight_requests 0.0" in text

            before = {w.info.worker_id: w.calls.count("reserve") for w in world.all_workers}
            for _ in range(100):
                assert await world.ask(QUESTION) == answer(QUESTION)
            given = [w.calls.count("reserve") - before[w.info.worker_id] for w in world.all_workers[2:]]
            assert sum(given) == 100
            assert all(40 <= each <= 60 for each in given), given

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_random_kills_and_successors_change_no_token(seed: int) -> None:
    chance = random.Random(seed)

    async def kill_some(world: World) -> None:
        for generation in range(2, 12):
            await asyncio.sleep(chance.random() * 0.02)
            victim = chance.choice(list(world.workers.values()))
            victim.die()
            await asyncio.sleep(chance.random() * 0.02)
            number = int(victim.info.worker_id.rsplit("-", 1)[1])
            world.join(victim.info.role, number=number, generation=generation)

    async def main() -> None:
        async with running(disaggregated(fast_config(max_attempts=20), num_prefill=2, num_decode=2)) as world:
            killing = asyncio.create_task(kill_some(world))
            while not killing.done():
                questions = [
                    request(tuple(chance.randrange(999) for _ in range(20)), max_tokens=20) for _ in range(8)
                ]
                got = await asyncio.gather(*(world.ask(question) for question in questions))
                assert got == [answer(question) for question in questions]
            await killing
            world.assert_at_rest()

    asyncio.run(main())


async def upstream_error(chance: random.Random) -> None:
    if chance.random() < 0.3:
        raise chance.choice(
            [WorkerLost("decode-0", "connection reset"), TransferDamaged("bad"), InternalError("a bug")]
        )


def assert_survivors_at_rest(world: World, hit: list[FakeWorker]) -> None:
    """A frozen worker keeps its ticket until its lease is over; nobody else keeps anything."""
    for worker in hit:
        worker.is_dead = True
    world.assert_at_rest()
