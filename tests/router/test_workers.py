"""WorkerPool: who is there, who fits, who is silent, and who is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.config import Fallback
from router.guard import Guard
from tests.router.fakes import World, disaggregated, fast_config, running, worker_info
from tests.toys import layout, request
from twinpool.core.clock import ManualClock
from twinpool.core.errors import ConfigError, LayoutMismatch, WorkerLost
from twinpool.core.ports import Role, WorkerLoad


def in_loop(check: object) -> None:
    async def main() -> None:
        await check()  # type: ignore[operator]

    asyncio.run(main())


def states(world: World) -> dict[str, str]:
    return {handle.worker_id: handle.state.value for handle in world.pool.handles}


def test_a_worker_is_ready_once_it_has_said_how_it_is() -> None:
    async def check() -> None:
        world = World()
        world.workers["decode-0"] = disaggregated().workers["decode-0"]
        world.pool.joined(worker_info(Role.DECODE))
        assert states(world) == {"decode-0": "joining"}
        world.pool.heard("decode-0", 1, WorkerLoad(free_blocks=32))
        assert states(world) == {"decode-0": "ready"}
        world.pool.heard("decode-0", 1, WorkerLoad(free_blocks=32, draining=True))
        assert states(world) == {"decode-0": "draining"}
        world.pool.heard("decode-0", 1, WorkerLoad(free_blocks=32, stalled_s=5.5))
        assert states(world) == {"decode-0": "stalled"}

    in_loop(check)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": layout(num_layers=3)}, "num_layers: prefill-0 stores 2, decode-1 stores 3"),
        (
            {"kv": replace(layout(), dtype="bfloat16")},
            "dtype: prefill-0 stores float32, decode-1 stores bfloat16",
        ),
        (
            {"fingerprint": {"model": "toy", "rope": "yarn"}},
            "rope: prefill-0 stores nothing, decode-1 stores yarn",
        ),
        ({"fingerprint": {"model": "other"}}, "model: prefill-0 stores toy, decode-1 stores other"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_the_setting(
    change: dict[str, object], message: str
) -> None:
    async def check() -> None:
        world = disaggregated(num_decode=0)
        with pytest.raises(LayoutMismatch, match=f"^{message}$"):
            world.pool.joined(worker_info(Role.DECODE, number=1, **change))  # type: ignore[arg-type]
        assert list(states(world)) == ["prefill-0"]

    in_loop(check)


def test_when_all_have_left_the_next_one_defines_the_layout() -> None:
    async def check() -> None:
        world = disaggregated(num_decode=0)
        world.workers["prefill-0"].die()
        world.workers["decode-1"] = world.all_workers[0]
        world.pool.joined(worker_info(Role.DECODE, number=1, kv=layout(num_layers=3)))
        assert list(states(world)) == ["decode-1"]

    in_loop(check)


def test_a_later_life_replaces_an_earlier_one_and_an_earlier_one_is_refused() -> None:
    async def check() -> None:
        world = disaggregated()
        old = world.pool.get("decode-0")
        assert old is not None
        with (
            pytest.raises(WorkerLost, match="worker decode-0 is lost: a later life of it joined"),
            Guard(old, timeout_s=5.0),
        ):
            world.join(Role.DECODE, generation=3)
            await asyncio.Event().wait()
        with pytest.raises(ConfigError, match="generation 2 is not later than the one here, 3"):
            world.join(Role.DECODE, generation=2)
        world.pool.left("decode-0", 1, "a late good-bye of the first life")
        world.pool.heard("decode-0", 1, WorkerLoad(draining=True))
        assert states(world)["decode-0"] == "ready"
        await asyncio.sleep(0)
        assert world.all_workers[1].is_closed

    in_loop(check)


def test_silence_freezes_and_a_word_thaws() -> None:
    async def check() -> None:
        clock = ManualClock()
        world = World(fast_config(lost_after_s=3.0, heartbeat_s=0.5), clock=clock)
        world.join(Role.DECODE)
        for _ in range(8):
            clock.advance(0.375)
            world.pool.sweep()
        assert states(world) == {"decode-0": "ready"}
        clock.advance(0.375)
        world.pool.sweep()
        assert states(world) == {"decode-0": "frozen"}
        with (
            pytest.raises(WorkerLost, match=r"silent for 3.4 s"),
            Guard(world.pool.handles[0], timeout_s=1.0),
        ):
            pass
        world.beat()
        assert states(world) == {"decode-0": "ready"}

    in_loop(check)


def test_a_router_that_slept_itself_does_not_hold_its_own_sleep_against_workers() -> None:
    async def check() -> None:
        clock = ManualClock()
        world = World(fast_config(lost_after_s=3.0, heartbeat_s=0.5), clock=clock)
        world.join(Role.DECODE)
        clock.advance(60.0)
        world.pool.sweep()
        assert states(world) == {"decode-0": "ready"}
        for _ in range(9):
            clock.advance(0.375)
            world.pool.sweep()
        assert states(world) == {"decode-0": "frozen"}

    in_loop(check)


def test_listeners_hear_of_joins_losses_freezes_and_thaws() -> None:
    async def check() -> None:
        clock = ManualClock()
        world = World(fast_config(lost_after_s=3.0, heartbeat_s=0.5), clock=clock)
        heard: list[dict[str, str]] = []
        world.pool.subscribe(lambda: heard.append(states(world)))
        worker = world.join(Role.DECODE)
        for _ in range(9):
            clock.advance(0.375)
            world.pool.sweep()
        world.beat()
        worker.die()
        assert heard == [
            {"decode-0": "joining"},
            {"decode-0": "ready"},
            {"decode-0": "frozen"},
            {"decode-0": "ready"},
            {},
        ]

    in_loop(check)


def test_without_a_prefill_worker_the_fallback_decides_whether_there_are_answers() -> None:
    async def check() -> None:
        for fallback, can_answer in ((Fallback.LOCAL, True), (Fallback.REFUSE, False)):
            world = World(fast_config(fallback=fallback))
            world.join(Role.DECODE)
            assert (world.pool.is_ready, world.pool.can_answer) == (False, can_answer)

    in_loop(check)


@pytest.mark.parametrize(
    ("roles", "needs_prefill", "is_ready"),
    [
        ([], True, False),
        ([Role.DECODE], True, False),
        ([Role.PREFILL], True, False),
        ([Role.PREFILL, Role.DECODE], True, True),
        ([Role.DECODE], False, True),
        ([Role.COLOCATED], True, True),
    ],
)
def test_ready_means_that_the_deployment_can_answer_as_configured(
    roles: list[Role], needs_prefill: bool, is_ready: bool
) -> None:
    async def check() -> None:
        world = World(fast_config(), needs_prefill=needs_prefill)
        for role in roles:
            world.join(role)
        assert world.pool.is_ready is is_ready
        assert await world.pool.wait_ready(timeout_s=0.01) is is_ready

    in_loop(check)


def test_waiting_for_readiness_ends_when_the_last_needed_worker_speaks() -> None:
    async def check() -> None:
        async with running(disaggregated(num_decode=0)) as world:
            waiting = asyncio.create_task(world.pool.wait_ready(timeout_s=5.0))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            world.join(Role.DECODE)
            assert await waiting

    in_loop(check)


def test_the_largest_request_is_what_the_smallest_member_can_hold() -> None:
    async def check() -> None:
        world = World()
        assert world.pool.max_request_tokens is None
        world.join(Role.PREFILL)
        assert world.pool.max_request_tokens == 256
        world.join(Role.DECODE, num_blocks=8)
        assert world.pool.max_request_tokens == 8 * 16 + 1
        world.join(Role.DECODE, number=1, num_blocks=30, kv=layout(block_tokens=4))
        assert world.pool.max_request_tokens == 30 * 4 + 1
        world.join(Role.DECODE, number=2, num_blocks=3, kv=layout(block_tokens=32))
        assert world.pool.max_request_tokens == 3 * 32 + 1

    in_loop(check)


def test_free_blocks_are_counted_in_the_blocks_of_each_worker() -> None:
    async def check() -> None:
        world = World()
        for number, block_tokens in enumerate((4, 16, 32)):
            world.join(Role.DECODE, number=number, kv=layout(block_tokens=block_tokens))
        for handle in world.pool.handles:
            handle.take(num_tokens=33)
        assert [handle.free_blocks for handle in world.pool.handles] == [32 - 9, 32 - 3, 32 - 2]

        snapshot = world.pool.snapshot(is_avoided=lambda _: False, is_full=lambda _: False)
        large = request(tuple(range(93)))  # and one token more: 24 blocks, 6 or 3
        assert [worker.has_room(large) for worker in snapshot.decode] == [False, True, True]

    in_loop(check)


def test_free_blocks_follow_what_was_taken_since_the_last_heartbeat() -> None:
    async def check() -> None:
        world = disaggregated()
        handle = world.pool.get("decode-0")
        assert handle is not None
        handle.take(num_tokens=33)
        assert (handle.free_blocks, handle.in_flight, handle.in_flight_tokens) == (29, 1, 33)
        handle.give_back(handle.tenure, num_tokens=33)
        assert (handle.free_blocks, handle.in_flight, handle.in_flight_tokens) == (32, 0, 0)

    in_loop(check)
