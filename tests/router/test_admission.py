"""Admission: bounded, fair, and exact however its waiters end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import Admission, Turn
from twinpool.core.clock import ManualClock
from twinpool.core.errors import PromptTooLong, QueueFull


class Room:
    """So many places; whoever got one must give it back."""

    def __init__(self, size: int) -> None:
        self.free = size
        self.clock = ManualClock()
        self.line: Admission[Place] = Admission(max_queued=100, overtake_s=5.0, clock=self.clock)

    def taker(self, size: int = 1) -> Callable[[], Place | None]:
        def take() -> Place | None:
            if self.free < size:
                return None
            self.free -= size
            return Place(self, size)

        return take

    async def enter(self, turn: Turn, *, size: int = 1, timeout_s: float = 5.0) -> Place:
        return await self.line.enter(turn, self.taker(size), timeout_s=timeout_s)


class Place:
    def __init__(self, room: Room, size: int) -> None:
        self._room = room
        self._size = size
        self._is_open = True

    def close(self) -> None:
        assert self._is_open, "given back twice"
        self._is_open = False
        self._room.free += self._size
        self._room.line.wake()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_room_is_given_at_once_when_nobody_waits() -> None:
    async def main() -> None:
        room = Room(1)
        place = await room.enter(room.line.arrive("a"))
        assert (room.free, room.line.num_queued) == (0, 0)
        place.close()

    asyncio.run(main())


def test_a_new_request_is_refused_when_the_line_is_full_and_one_that_comes_back_is_not() -> None:
    async def main() -> None:
        room = Room(1)
        room.line = Admission(max_queued=1, overtake_s=5.0, clock=room.clock)
        first = room.line.arrive("a")
        place = await room.enter(first)
        waiting = asyncio.create_task(room.enter(room.line.arrive("a")))
        await settle()
        with pytest.raises(QueueFull, match="1 requests wait already"):
            await room.enter(room.line.arrive("a"))
        back = asyncio.create_task(room.enter(first))
        await settle()
        assert room.line.num_queued == 2
        place.close()
        (await back).close()
        (await waiting).close()
        assert (room.free, room.line.num_queued) == (1, 0)

    asyncio.run(main())


def test_one_that_comes_back_keeps_its_place_in_the_line() -> None:
    async def main() -> None:
        room = Room(0)
        turns = [room.line.arrive("a") for _ in range(3)]
        order: list[int] = []

        async def wait(turn: Turn) -> None:
            place = await room.enter(turn)
            order.append(turn.number)
            place.close()

        tasks = []
        for turn in (turns[1], turns[2], turns[0]):
            tasks.append(asyncio.create_task(wait(turn)))
            await settle()
        room.free = 1
        room.line.wake()
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3]

    asyncio.run(main())


def test_tenants_take_turns_however_long_the_line_of_one_is() -> None:
    async def main() -> None:
        room = Room(0)
        order: list[str] = []

        async def wait(tenant: str) -> None:
            place = await room.enter(room.line.arrive(tenant))
            order.append(tenant)
            await settle()
            place.close()

        tasks = [asyncio.create_task(wait("greedy")) for _ in range(20)]
        await settle()
        tasks += [asyncio.create_task(wait(tenant)) for tenant in ("b", "c", "b")]
        await settle()
        room.free = 1
        room.line.wake()
        await asyncio.gather(*tasks)
        assert order[:6] == ["greedy", "b", "c", "greedy", "b", "greedy"]
        assert order[6:] == ["greedy"] * 17

    asyncio.run(main())


def test_a_small_request_passes_a_large_one_but_not_for_ever() -> None:
    async def main() -> None:
        room = Room(10)
        places = [await room.enter(room.line.arrive("a"), size=5) for _ in range(2)]
        large = asyncio.create_task(room.enter(room.line.arrive("a"), size=10))
        small = asyncio.create_task(room.enter(room.line.arrive("a"), size=1))
        await settle()
        places[0].close()
        (await small).close()
        room.clock.advance(6.0)
        late = asyncio.create_task(room.enter(room.line.arrive("a"), size=1))
        await settle()
        assert not late.done()
        places[1].close()
        await settle()
        assert large.done() and not late.done()
        large.result().close()
        (await late).close()
        assert room.free == 10

    asyncio.run(main())


def test_too_late_is_a_timeout_and_leaves_nothing() -> None:
    async def main() -> None:
        room = Room(0)
        with pytest.raises(TimeoutError):
            await room.enter(room.line.arrive("a"), timeout_s=0.01)
        with pytest.raises(TimeoutError):
            await room.enter(room.line.arrive("a"), timeout_s=0.0)
        assert room.line.num_queued == 0

    asyncio.run(main())


def test_an_error_of_one_request_is_its_own() -> None:
    async def main() -> None:
        room = Room(0)

        def too_long() -> None:
            if room.free:
                raise PromptTooLong(needed_tokens=9, limit_tokens=8)

        bad = asyncio.create_task(room.line.enter(room.line.arrive("a"), too_long, timeout_s=5.0))
        good = asyncio.create_task(room.enter(room.line.arrive("a")))
        await settle()
        room.free = 1
        room.line.wake()
        (await good).close()
        with pytest.raises(PromptTooLong):
            await bad

    asyncio.run(main())


def test_room_found_in_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    async def main() -> None:
        room = Room(1)
        place = await room.enter(room.line.arrive("a"))
        leaving = asyncio.create_task(room.enter(room.line.arrive("a")))
        staying = asyncio.create_task(room.enter(room.line.arrive("a")))
        await settle()
        place.close()  # grants it to the one that leaves
        leaving.cancel()
        (await staying).close()
        assert leaving.cancelled()
        assert (room.free, room.line.num_queued) == (1, 0)

    asyncio.run(main())


STEP = st.tuples(
    st.sampled_from(["enter", "cancel", "close", "turn"]), st.integers(0, 50), st.sampled_from("abc")
)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 3), steps=st.lists(STEP, max_size=60))
def test_no_schedule_of_arrivals_cancellations_and_releases_loses_room_or_a_wake_up(
    size: int, steps: list[tuple[str, int, str]]
) -> None:
    async def main() -> None:
        room = Room(size)
        tasks: list[asyncio.Task[Place]] = []
        closed: set[int] = set()
        for action, number, tenant in steps:
            if action == "enter":
                tasks.append(asyncio.create_task(room.enter(room.line.arrive(tenant))))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif action == "close" and tasks:
                i = number % len(tasks)
                if tasks[i].done() and not tasks[i].cancelled() and i not in closed:
                    closed.add(i)
                    tasks[i].result().close()
            else:
                await asyncio.sleep(0)
        await settle()

        held = [i for i, t in enumerate(tasks) if t.done() and not t.cancelled() and i not in closed]
        waiting = [t for t in tasks if not t.done()]
        assert room.free == size - len(held)
        assert room.line.num_queued == len(waiting)
        assert room.free == 0 or not waiting, "room is free and somebody waits"
        for i in held:
            tasks[i].result().close()
        while waiting:
            await settle()
            done = [t for t in waiting if t.done()]
            assert done, "a waiter was never woken"
            waiting = [t for t in waiting if not t.done()]
            for task in done:
                task.result().close()
        assert (room.free, room.line.num_queued) == (size, 0)

    asyncio.run(main())
