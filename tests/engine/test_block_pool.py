"""BlockPool: all or nothing, one owner a block, and numbers that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.errors import NoFreeBlocks
from twinpool.core.ports import BlockCounts
from twinpool.engine.block_pool import BlockPool


def test_blocks_go_from_free_to_owned_to_draining_and_back() -> None:
    pool = BlockPool(5)

    blocks = pool.allocate(7, 3)
    owned = pool.counts()
    pool.drain(7, blocks)
    draining = pool.counts()
    pool.free(7, blocks)

    assert owned == BlockCounts(total=5, free=2, cached=0, owned=3, draining=0)
    assert draining == BlockCounts(total=5, free=2, cached=0, owned=0, draining=3)
    assert pool.counts() == BlockCounts(total=5, free=5, cached=0, owned=0, draining=0)


def test_too_large_an_allocation_takes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(1, 3)

    with pytest.raises(NoFreeBlocks, match="need 3 KV blocks, 2 of 5 are free") as caught:
        pool.allocate(2, 3)

    assert (caught.value.needed, caught.value.free, caught.value.total) == (3, 2, 5)
    assert pool.num_free == 2


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(1, 2)
    pool.free(1, blocks)

    with pytest.raises(AssertionError, match="is not owned by 1"):
        pool.free(1, blocks)


def test_one_call_cannot_free_a_block_twice() -> None:
    pool = BlockPool(5)
    (block,) = pool.allocate(1, 1)

    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(1, [block, block])

    assert pool.counts().owned == 1


@pytest.mark.parametrize("call", ["free", "drain"])
def test_nobody_can_give_away_the_blocks_of_another(call: str) -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(1, 2)

    with pytest.raises(AssertionError, match="is not owned by 2"):
        getattr(pool, call)(2, blocks)

    assert pool.counts().owned == 2


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from(("take", "drain", "free")), st.integers(0, 6))))
def test_after_any_calls_each_block_is_in_one_place(num_blocks: int, calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: dict[int, list[int]] = {}
    draining: set[int] = set()

    for owner, (call, number) in enumerate(calls):
        if call == "take":
            free = pool.num_free
            try:
                held[owner] = pool.allocate(owner, number)
            except NoFreeBlocks:
                assert number > free
        elif held:
            other = sorted(held)[number % len(held)]
            if call == "drain":
                pool.drain(other, held[other])
                draining.update(held[other])
            else:
                draining.difference_update(held[other])
                pool.free(other, held.pop(other))

        everyone = [block for blocks in held.values() for block in blocks]
        assert len(set(everyone)) == len(everyone)
        assert pool.counts() == BlockCounts(
            total=num_blocks,
            free=num_blocks - len(everyone),
            cached=0,
            owned=len(everyone) - len(draining),
            draining=len(draining),
        )
