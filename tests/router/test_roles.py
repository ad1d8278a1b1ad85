"""A worker gets another role while it runs: no token is lost, and what fails leaves it as it was."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import Fallback
from router.roles import RoleChange, RoleOrder
from tests.router.fakes import World, answer, fast_config, running
from tests.toys import request
from tests.virtual_time import LoopClock, run_in_virtual_time
from twinpool.core.errors import DeadlineExceeded, InvalidRequest, ServingError, Unavailable
from twinpool.core.ports import Role
from twinpool.core.request import Request

PREFILL, DECODE, COLOCATED = Role.PREFILL, Role.DECODE, Role.COLOCATED
LONG = request(tuple(range(20)), max_tokens=40, timeout_s=300.0)
TOKEN_S = 0.1  # so LONG takes 4 s


def world_of(prefill: int = 0, decode: int = 0, colocated: int = 0, **limits: object) -> World:
    """Workers that take TOKEN_S for a token; one failed attempt is one too many."""
    world = World(fast_config(max_attempts=1, **limits), clock=LoopClock(), needs_prefill=prefill > 0)
    for role, count in ((PREFILL, prefill), (DECODE, decode), (COLOCATED, colocated)):
        for number in range(count):
            worker = world.join(role, number=number)
            worker.hooks["token"] = lambda: asyncio.sleep(TOKEN_S)
    return world


def check(world: Callable[[], World], scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Run ``scenario`` in virtual time; whoever lives holds nothing at its end."""

    async def main() -> None:
        async with running(world()) as there:
            await scenario(there)
            assert {handle.becomes for handle in there.pool.handles} <= {None}
            there.assert_at_rest()

    run_in_virtual_time(main())


async def ignore(_: RoleChange) -> None:
    return


async def change(world: World, worker_id: str, role: Role, **order: Any) -> RoleChange:
    return await world.router.roles.change(
        RoleOrder(worker_id=worker_id, role=role, **order), on_changed=ignore
    )


def roles(world: World) -> dict[str, str]:
    return {handle.worker_id: handle.info.role.value for handle in world.pool.handles}


def moves(world: World) -> float:
    """How many attempts began because a worker got another role."""
    lines = world.router.metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith('twinpool_retries_total{reason="Reassigned"}')]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_an_idle_worker_takes_its_role_at_once_and_work_of_that_role() -> None:
    async def scenario(world: World) -> None:
        told: list[RoleChange] = []

        async def note(change: RoleChange) -> None:
            told.append(change)

        order = RoleOrder(worker_id="decode-1", role=PREFILL)
        done = await world.router.roles.change(order, on_changed=note)

        assert told == [done]
        assert (done.was, done.role, done.generation, done.num_moved) == (DECODE, PREFILL, 1, 0)
        assert done.freed_blocks is None and done.took_s == 0.0
        assert roles(world) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}
        assert (await world.workers["decode-1"].audit()).role is PREFILL
        for _ in range(2):
            assert await world.ask(LONG) == answer(LONG)
        assert "prefill" in world.workers["decode-1"].calls
        assert "reserve" not in world.workers["decode-1"].calls
        assert 'twinpool_role_changes_total{outcome="changed",role="prefill"} 1.0' in (
            world.router.metrics.render().decode()
        )

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_what_runs_ends_there_and_nothing_new_begins() -> None:
    async def scenario(world: World) -> None:
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(4)]
        await asyncio.sleep(1.0)
        changing = asyncio.create_task(change(world, "decode-1", PREFILL, clear_cache=True))
        await asyncio.sleep(0.5)
        handle = world.pool.get("decode-1")
        assert handle is not None and (handle.state.value, handle.in_flight) == ("changing", 2)
        assert handle.info.role is DECODE
        begun = world.workers["decode-1"].calls.count("reserve")
        late = [asyncio.create_task(world.ask(LONG)) for _ in range(4)]

        done = await changing

        assert done.took_s == pytest.approx(3.0 - 1.0, abs=1.5)
        assert (done.num_moved, done.freed_blocks) == (0, 3)
        calls = world.workers["decode-1"].calls
        assert calls.count("reserve") == begun == 2
        assert [call for call in calls if call in ("clear_cache", "assign")] == ["clear_cache", "assign"]
        assert calls.index("clear_cache") > max(i for i, call in enumerate(calls) if call == "release")
        assert [await each for each in asking + late] == [answer(LONG)] * 8
        assert moves(world) == 0

    check(lambda: world_of(prefill=1, decode=2), scenario)


@pytest.mark.parametrize(("worker_id", "role"), [("decode-1", PREFILL), ("decode-1", COLOCATED)])
def test_what_lasts_too_long_goes_on_elsewhere_from_the_last_token_on(worker_id: str, role: Role) -> None:
    async def scenario(world: World) -> None:
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(4)]
        await asyncio.sleep(1.0)

        done = await change(world, worker_id, role, timeout_s=1.0)

        assert done.num_moved == 2
        assert done.took_s == pytest.approx(1.0, abs=0.2)
        assert [await each for each in asking] == [answer(LONG)] * 4
        assert moves(world) == 2
        # What was sent was not asked for again: each of the two had 19 or 20 of its 40 tokens.
        continued = [each for each in world.workers["prefill-0"].requests if each.output_ids]
        assert [len(each.output_ids) for each in continued] == pytest.approx([20, 20], abs=2)

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_prompts_that_last_too_long_are_computed_elsewhere() -> None:
    async def scenario(world: World) -> None:
        slow = world.workers["prefill-1"]
        slow.hooks["prefill"] = slow.stall
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(4)]

        done = await change(world, "prefill-1", DECODE, timeout_s=2.0)

        assert done.num_moved == 2
        assert [await each for each in asking] == [answer(LONG)] * 4
        assert roles(world)["prefill-1"] == "decode"

    check(lambda: world_of(prefill=2, decode=1), scenario)


def test_a_client_that_reads_slowly_is_moved_when_it_reads_on() -> None:
    async def scenario(world: World) -> None:
        tokens = []
        async with aclosing(world.router.generate(LONG, world.timeline(LONG))) as outputs:
            async for output in outputs:
                tokens.append(output.token_id)
                if len(tokens) == 5:
                    busy = next(h for h in world.pool.handles if h.info.role is DECODE and h.in_flight)
                    changing = asyncio.create_task(change(world, busy.worker_id, PREFILL, timeout_s=1.0))
                    await asyncio.sleep(5.0)
                    assert not changing.done()  # the toy worker computes a token when it is read
        assert tokens == answer(LONG)
        assert (await changing).num_moved == 1

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_a_client_that_had_only_its_first_token_goes_on_elsewhere_too() -> None:
    async def scenario(world: World) -> None:
        async with aclosing(world.router.generate(LONG, world.timeline(LONG))) as outputs:
            tokens = [(await anext(outputs)).token_id]
            busy = next(h for h in world.pool.handles if h.info.role is DECODE and h.in_flight)
            with pytest.raises(Unavailable, match="still holds something of its requests"):  # a ticket
                await change(world, busy.worker_id, PREFILL, timeout_s=0.5)
            tokens += [output.token_id async for output in outputs]
        assert tokens == answer(LONG)
        assert moves(world) == 1

    check(lambda: world_of(prefill=1, decode=2, role_settle_s=0.5), scenario)


def test_a_client_that_reads_nothing_keeps_no_worker_from_its_role() -> None:
    async def scenario(world: World) -> None:
        async with aclosing(world.router.generate(LONG, world.timeline(LONG))) as outputs:
            tokens = [(await anext(outputs)).token_id for _ in range(5)]
            busy = next(h for h in world.pool.handles if h.info.role is DECODE and h.in_flight)
            worker = world.workers[busy.worker_id]

            async def finish() -> None:  # as an engine does, whether somebody reads or not
                reserved, worker.reservations = worker.reservations, {}
                worker.free_blocks += sum(each.num_blocks for each in reserved.values())
                worker.num_running = 0

            worker.hooks["audit"] = finish
            done = await change(world, busy.worker_id, PREFILL, timeout_s=1.0)

            assert (done.role, done.num_moved, busy.in_flight) == (PREFILL, 0, 0)
            assert done.took_s == pytest.approx(11.0, abs=0.2)
            worker.num_running = 1  # what its stream gives back when it is closed
            tokens += [output.token_id async for output in outputs]
        assert tokens == answer(LONG)
        assert moves(world) == 1

    check(lambda: world_of(prefill=1, decode=2, role_settle_s=10.0), scenario)


def test_if_nobody_else_can_go_on_the_old_role_is_restored() -> None:
    async def scenario(world: World) -> None:
        asking = asyncio.create_task(world.ask(LONG))
        await asyncio.sleep(1.0)
        message = (
            "decode-0 still has 1 in flight after 2 s, and nobody else could go on; it is decode as before"
        )
        with pytest.raises(Unavailable, match=message):
            await change(world, "decode-0", PREFILL, timeout_s=2.0, is_forced=True)
        assert await asking == answer(LONG)
        assert moves(world) == 0
        assert roles(world)["decode-0"] == "decode"
        assert await world.ask(LONG) == answer(LONG)
        assert 'twinpool_role_changes_total{outcome="failed",role="prefill"} 1.0' in (
            world.router.metrics.render().decode()
        )

    check(lambda: world_of(prefill=1, decode=1), scenario)


def test_a_worker_whose_books_do_not_empty_keeps_its_role() -> None:
    async def scenario(world: World) -> None:
        world.workers["decode-1"].audit_error = 1
        with pytest.raises(
            Unavailable,
            match="decode-1 still holds something of its requests 3 s after they went elsewhere; it is",
        ):
            await change(world, "decode-1", PREFILL, timeout_s=1.0)
        world.workers["decode-1"].audit_error = 0
        assert "assign" not in world.workers["decode-1"].calls
        assert [await world.ask(LONG) for _ in range(2)] == [answer(LONG)] * 2
        assert "reserve" in world.workers["decode-1"].calls

    check(lambda: world_of(prefill=1, decode=2, role_settle_s=3.0), scenario)


SPLIT, ALONE = {"prefill": 1, "decode": 1}, {"colocated": 1}


@pytest.mark.parametrize(
    ("there", "worker_id", "role", "message"),
    [
        (SPLIT, "decode-7", PREFILL, "decode-7 is not here; the workers are prefill-0, decode-0"),
        (SPLIT, "decode-0", PREFILL, "decode-0 as prefill would leave no decode worker"),
        (ALONE, "colocated-0", PREFILL, "colocated-0 as prefill would leave no decode worker"),
        (SPLIT, "prefill-0", DECODE, "prefill-0 as decode would leave no prefill worker"),
        (SPLIT, "decode-0", COLOCATED, "while decode-0 changes its role nobody could answer"),
        (ALONE, "colocated-0", DECODE, "while colocated-0 changes its role nobody could answer"),
    ],
)
def test_what_leaves_nobody_to_answer_is_refused_and_changes_nothing(
    there: dict[str, int], worker_id: str, role: Role, message: str
) -> None:
    async def scenario(world: World) -> None:
        before = roles(world)
        with pytest.raises(InvalidRequest) as caught:
            await change(world, worker_id, role)
        assert str(caught.value) == f"worker: {message}"
        assert roles(world) == before
        assert all(worker.calls == [] for worker in world.all_workers)

    check(lambda: world_of(**there, fallback=Fallback.REFUSE), scenario)


def test_with_the_local_fallback_the_last_prefill_worker_may_go_and_with_force_the_last_decode_worker() -> (
    None
):
    async def scenario(world: World) -> None:
        await change(world, "prefill-0", DECODE)
        assert await world.ask(LONG) == answer(LONG)
        await change(world, "prefill-0", PREFILL)
        await change(world, "decode-0", PREFILL, is_forced=True)
        assert not world.pool.can_answer
        await change(world, "decode-0", DECODE)  # nobody answers now either, and it helps
        assert await world.ask(LONG) == answer(LONG)

    check(lambda: world_of(prefill=1, decode=1), scenario)


def test_a_colocated_deployment_becomes_a_split_one_and_back() -> None:
    async def scenario(world: World) -> None:
        assert not world.pool.needs_prefill
        for worker_id, role in (("colocated-0", PREFILL), ("colocated-1", DECODE), ("colocated-2", DECODE)):
            await change(world, worker_id, role)
            assert await world.ask(LONG) == answer(LONG)
        assert world.pool.needs_prefill
        assert (world.router.pool.is_ready, world.workers["colocated-0"].calls[-2:]) == (
            True,
            ["prefill", "prefilled"],
        )
        for number in (0, 1, 2):
            await change(world, f"colocated-{number}", COLOCATED)
            assert await world.ask(LONG) == answer(LONG)
        assert not world.pool.needs_prefill

    check(lambda: world_of(colocated=3), scenario)


def test_a_worker_that_has_the_role_is_left_alone_but_for_its_cache() -> None:
    async def scenario(world: World) -> None:
        asking = asyncio.create_task(world.ask(LONG))
        await asyncio.sleep(1.0)
        done = await change(world, "decode-0", DECODE, clear_cache=True)
        assert (done.was, done.role, done.freed_blocks, done.took_s) == (DECODE, DECODE, 3, 0.0)
        assert "assign" not in world.workers["decode-0"].calls
        assert await asking == answer(LONG)

    check(lambda: world_of(prefill=1, decode=1), scenario)


def test_two_changes_at_once_come_one_after_the_other_and_the_second_knows_of_the_first() -> None:
    async def scenario(world: World) -> None:
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(2)]
        await asyncio.sleep(1.0)
        first = asyncio.create_task(change(world, "decode-0", PREFILL))
        second = asyncio.create_task(change(world, "decode-1", PREFILL))
        await asyncio.sleep(0.5)
        states = {handle.worker_id: handle.state.value for handle in world.pool.handles}
        assert states == {"prefill-0": "ready", "decode-0": "changing", "decode-1": "ready"}

        assert (await first).role is PREFILL
        with pytest.raises(InvalidRequest, match="decode-1 as prefill would leave no decode worker"):
            await second
        assert [await each for each in asking] == [answer(LONG)] * 2

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_who_waits_too_long_for_another_change_is_refused() -> None:
    async def scenario(world: World) -> None:
        asking = asyncio.create_task(world.ask(LONG))
        await asyncio.sleep(0.5)
        busy = next(h.worker_id for h in world.pool.handles if h.info.role is DECODE and h.in_flight)
        first = asyncio.create_task(change(world, busy, PREFILL))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="another worker changes its role and did not end within 1 s"):
            await change(world, "prefill-0", DECODE)
        assert (await first).num_moved == 0
        assert await asking == answer(LONG)

    check(lambda: world_of(prefill=1, decode=2, queue_timeout_s=1.0), scenario)


@pytest.mark.parametrize("phase", ["audit", "clear_cache", "assign"])
def test_a_worker_that_dies_in_the_middle_loses_no_request_and_its_next_life_has_its_old_role(
    phase: str,
) -> None:
    async def scenario(world: World) -> None:
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(4)]
        await asyncio.sleep(1.0)
        victim = world.workers["decode-1"]

        async def die() -> None:
            if not victim.is_dead:
                victim.die()

        victim.hooks[phase] = die
        with pytest.raises(
            Unavailable,
            match=r"decode-1 was lost on the way to prefill: .*; its next life is decode as before",
        ):
            await change(world, "decode-1", PREFILL, timeout_s=60.0, clear_cache=True)
        world.join(DECODE, number=1, generation=2)
        assert [await each for each in asking] == [answer(LONG)] * 4
        assert roles(world)["decode-1"] == "decode"

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_a_worker_that_freezes_in_the_middle_is_as_it_was_when_it_speaks_again() -> None:
    async def scenario(world: World) -> None:
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(2)]
        await asyncio.sleep(1.0)
        changing = asyncio.create_task(change(world, "decode-1", PREFILL))
        await asyncio.sleep(0.5)
        world.workers["decode-1"].freeze()
        with pytest.raises(Unavailable, match=r"on the way to prefill: silent for 0\.3 s"):
            await changing
        # A frozen worker is a failed attempt of its own request.
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert [end for end in ends if not isinstance(end, ServingError)] == [answer(LONG)]
        world.workers["decode-1"].thaw()
        await asyncio.sleep(1.0)
        handle = world.pool.get("decode-1")
        assert handle is not None and (handle.state.value, handle.info.role) == ("ready", DECODE)
        thawed = world.workers["decode-1"]  # whose reservation is left to its lease
        thawed.reservations, thawed.free_blocks = {}, thawed.info.num_blocks

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_one_that_is_told_and_does_not_answer_is_told_its_old_role_again() -> None:
    async def scenario(world: World) -> None:
        victim, heard = world.workers["decode-1"], []

        async def hear_and_be_silent_once() -> None:
            heard.append(victim.role)
            if len(heard) == 1:
                victim.role = PREFILL
                await asyncio.Event().wait()

        victim.hooks["assign"] = hear_and_be_silent_once
        with pytest.raises(
            Unavailable, match=r"decode-1 was lost on the way to prefill: no answer within 0.2 s"
        ):
            await change(world, "decode-1", PREFILL)
        assert (heard, victim.role, roles(world)["decode-1"]) == ([DECODE, PREFILL], DECODE, "decode")

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_one_that_is_not_ready_is_left_alone() -> None:
    async def scenario(world: World) -> None:
        world.workers["decode-1"].is_draining = True
        world.beat()
        with pytest.raises(Unavailable, match="decode-1 is draining, not ready"):
            await change(world, "decode-1", PREFILL)

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_a_caller_that_leaves_does_not_stop_a_change() -> None:
    async def scenario(world: World) -> None:
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(2)]
        await asyncio.sleep(1.0)
        changing = asyncio.create_task(change(world, "decode-1", PREFILL))
        await asyncio.sleep(0.5)
        changing.cancel()
        assert [await each for each in asking] == [answer(LONG)] * 2
        await asyncio.sleep(1.0)
        assert roles(world)["decode-1"] == "prefill"

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_a_router_that_stops_ends_a_change_and_leaves_the_old_role() -> None:
    async def scenario(world: World) -> None:
        asking = [asyncio.create_task(world.ask(LONG)) for _ in range(2)]
        await asyncio.sleep(1.0)
        changing = asyncio.create_task(change(world, "decode-1", PREFILL))
        await asyncio.sleep(0.5)
        await world.router.roles.close()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert roles(world)["decode-1"] == "decode"
        assert [await each for each in asking] == [answer(LONG)] * 2

    check(lambda: world_of(prefill=1, decode=2), scenario)


def test_every_cache_is_cleared_and_one_that_does_not_answer_is_named() -> None:
    async def scenario(world: World) -> None:
        world.workers["decode-0"].hooks["clear_cache"] = world.workers["decode-0"].stall
        assert await world.router.clear_caches() == {
            "ok": False,
            "workers": [
                {"id": "prefill-0", "freed_blocks": 3},
                {"id": "decode-0", "error": "no answer within 0.2 s"},
            ],
        }

    check(lambda: world_of(prefill=1, decode=1), scenario)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_roles_workers_get_under_load_every_answer_is_right(seed: int) -> None:
    async def scenario(world: World) -> None:
        chance = random.Random(seed)
        asked: list[tuple[Request, asyncio.Task[list[int]]]] = []

        async def ask_forever() -> None:
            while True:
                each = request(
                    tuple(chance.randrange(1000) for _ in range(chance.randrange(1, 60))),
                    max_tokens=chance.randrange(1, 30),
                    timeout_s=600.0,
                )
                asked.append((each, asyncio.create_task(world.ask(each))))
                await asyncio.sleep(chance.uniform(0.0, 0.5))

        asking = asyncio.create_task(ask_forever())
        for _ in range(12):
            worker_id = chance.choice([handle.worker_id for handle in world.pool.handles])
            order: dict[str, Any] = {
                "timeout_s": chance.choice([0.001, 0.3, 1.0, 5.0]),
                "clear_cache": chance.random() < 0.5,
            }
            try:
                await change(world, worker_id, chance.choice(list(Role)), **order)
            except InvalidRequest:  # it would have left nobody
                await asyncio.sleep(0.2)
        asking.cancel()
        for each, task in asked:
            assert await task == answer(each)
        assert world.pool.can_answer

    check(lambda: world_of(prefill=1, decode=2, colocated=1), scenario)


def test_an_attempt_that_ran_out_of_time_is_no_move() -> None:
    """A tenure's end and a deadline may meet; the client is told of the deadline."""

    async def scenario(world: World) -> None:
        short = request(LONG.prompt_ids, max_tokens=40, timeout_s=2.0)
        asking = asyncio.create_task(world.ask(short))
        await asyncio.sleep(1.0)
        busy = next(h.worker_id for h in world.pool.handles if h.info.role is DECODE and h.in_flight)
        assert (await change(world, busy, PREFILL, timeout_s=10.0)).num_moved == 0
        with pytest.raises(DeadlineExceeded):
            await asking

    check(lambda: world_of(prefill=1, decode=2), scenario)
