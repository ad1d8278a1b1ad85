"""BlockPool: all or nothing, every owner counted, the useless given up first, and numbers that add up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.core.errors import NoFreeBlocks
from twinpool.core.ports import BlockCounts
from twinpool.engine.block_pool import BlockPool
from twinpool.engine.prefix_cache import BlockName, PrefixCache


def empty_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, PrefixCache(1))


class Shelf:
    """A pool of blocks of one token, and sequences that are written as texts: a letter a block."""

    def __init__(self, num_blocks: int) -> None:
        self.prefixes = PrefixCache(1)
        self.pool = BlockPool(num_blocks, self.prefixes)

    def names(self, text: str, salt: str = "") -> list[BlockName]:
        names: list[BlockName] = []
        self.prefixes.extend(names, [ord(letter) for letter in text], salt=salt)
        return names

    def start(self, owner: int, text: str, *, salt: str = "", spare: int = 0) -> tuple[list[int], int]:
        """Let ``owner`` find what it can and take the rest; return its blocks and how many it found."""
        got = self.pool.allocate(owner, len(text), prefix=self.names(text, salt), spare=spare)
        return got.blocks, got.num_shared

    def write(self, owner: int, text: str, *, salt: str = "") -> list[int]:
        """Let ``owner`` take blocks for ``text`` and publish all of it."""
        blocks, num_shared = self.start(owner, text, salt=salt)
        names = self.names(text, salt)
        for i in range(num_shared, len(text)):
            assert self.pool.publish(owner, blocks[i], names[i], after=blocks[i - 1] if i else None)
        return blocks

    def keep(self, owner: int, text: str, *, salt: str = "") -> list[int]:
        """Write ``text`` and let go of it, so that it is cached."""
        blocks = self.write(owner, text, salt=salt)
        self.pool.free(owner, blocks)
        return blocks

    def num_found(self, text: str, salt: str = "") -> int:
        return len(self.prefixes.find(self.names(text, salt)))


def test_blocks_go_from_free_to_owned_to_draining_and_back() -> None:
    pool = empty_pool(5)

    blocks = pool.allocate(7, 3).blocks
    owned = pool.counts()
    pool.drain(7, blocks)
    draining = pool.counts()
    pool.free(7, blocks)

    assert owned == BlockCounts(total=5, free=2, cached=0, owned=3, draining=0)
    assert draining == BlockCounts(total=5, free=2, cached=0, owned=0, draining=3)
    assert pool.counts() == BlockCounts(total=5, free=5, cached=0, owned=0, draining=0)


def test_too_large_an_allocation_takes_nothing() -> None:
    pool = empty_pool(5)
    pool.allocate(1, 3)

    with pytest.raises(NoFreeBlocks, match="need 3 KV blocks, 2 of 5 are free") as caught:
        pool.allocate(2, 3)

    assert (caught.value.needed, caught.value.free, caught.value.total) == (3, 2, 5)
    assert pool.num_available == 2


def test_a_block_cannot_be_freed_twice() -> None:
    pool = empty_pool(5)
    blocks = pool.allocate(1, 2).blocks
    pool.free(1, blocks)

    with pytest.raises(AssertionError, match="is not owned by 1"):
        pool.free(1, blocks)


def test_one_call_cannot_free_a_block_twice() -> None:
    pool = empty_pool(5)
    (block,) = pool.allocate(1, 1).blocks

    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(1, [block, block])

    assert pool.counts().owned == 1


@pytest.mark.parametrize("call", ["free", "drain"])
def test_nobody_can_give_away_the_blocks_of_another(call: str) -> None:
    pool = empty_pool(5)
    blocks = pool.allocate(1, 2).blocks

    with pytest.raises(AssertionError, match="is not owned by 2"):
        getattr(pool, call)(2, blocks)

    assert pool.counts().owned == 2


@pytest.mark.parametrize("call", ["free", "drain"])
def test_who_shared_a_cached_block_and_let_it_go_cannot_give_it_away_again(call: str) -> None:
    shelf = Shelf(5)
    blocks = shelf.keep(1, "ab")
    shelf.start(2, "ab")

    with pytest.raises(AssertionError, match="is not owned by 1"):
        getattr(shelf.pool, call)(1, blocks)


def test_nobody_can_publish_the_block_of_another() -> None:
    shelf = Shelf(5)
    blocks, _ = shelf.start(1, "ab")
    first, second = shelf.names("ab")
    shelf.pool.publish(1, blocks[0], first, after=None)

    with pytest.raises(AssertionError, match="is not owned by 2"):
        shelf.pool.publish(2, blocks[1], second, after=blocks[0])


def test_what_was_published_is_cached_and_found_again() -> None:
    shelf = Shelf(5)

    kept = shelf.keep(1, "abc")
    cached = shelf.pool.counts()
    blocks, num_found = shelf.start(2, "abx")

    assert cached == BlockCounts(total=5, free=2, cached=3, owned=0, draining=0)
    assert (blocks[:2], num_found) == (kept[:2], 2)
    assert shelf.pool.counts() == BlockCounts(total=5, free=1, cached=1, owned=3, draining=0)


def test_what_was_not_published_is_not_kept() -> None:
    shelf = Shelf(5)
    blocks, _ = shelf.start(1, "abc")
    shelf.pool.publish(1, blocks[0], shelf.names("abc")[0], after=None)

    shelf.pool.free(1, blocks)

    assert shelf.pool.counts() == BlockCounts(total=5, free=4, cached=1, owned=0, draining=0)
    assert shelf.num_found("abc") == 1


def test_a_shared_block_is_counted_once_and_kept_until_its_last_owner_goes() -> None:
    shelf = Shelf(5)
    first = shelf.write(1, "ab")
    second, _ = shelf.start(2, "ab")

    shared = shelf.pool.counts()
    shelf.pool.free(1, first)
    one_left = shelf.pool.counts()
    shelf.pool.free(2, second)

    assert second == first
    assert shared == one_left == BlockCounts(total=5, free=3, cached=0, owned=2, draining=0)
    assert shelf.pool.counts() == BlockCounts(total=5, free=3, cached=2, owned=0, draining=0)


def test_a_shared_block_drains_only_when_all_its_owners_do() -> None:
    shelf = Shelf(5)
    first = shelf.write(1, "ab")
    second, _ = shelf.start(2, "ab")

    shelf.pool.drain(1, first)
    one_drains = shelf.pool.counts()
    shelf.pool.drain(2, second)
    both_drain = shelf.pool.counts()
    shelf.pool.free(1, first)

    assert one_drains == BlockCounts(total=5, free=3, cached=0, owned=2, draining=0)
    assert both_drain == BlockCounts(total=5, free=3, cached=0, owned=0, draining=2)
    assert shelf.pool.counts() == BlockCounts(total=5, free=3, cached=0, owned=0, draining=2)


def test_cached_blocks_are_room_for_others() -> None:
    shelf = Shelf(4)
    shelf.keep(1, "abcd")

    available = shelf.pool.num_available
    shelf.pool.allocate(2, 3)

    assert available == 4
    assert shelf.pool.counts() == BlockCounts(total=4, free=0, cached=1, owned=3, draining=0)
    assert (shelf.num_found("abcd"), shelf.pool.num_evicted) == (1, 3)  # the beginning is worth most


def test_the_leaf_that_was_not_used_for_longest_is_evicted_first() -> None:
    shelf = Shelf(6)
    shelf.keep(1, "abc")
    shelf.keep(2, "xyz")
    shelf.keep(3, "ab")  # used again: only its end is old

    found = []
    for owner in range(4, 10):
        shelf.pool.allocate(owner, 1)
        found.append((shelf.num_found("abc"), shelf.num_found("xyz")))

    assert found == [(2, 3), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0)]


def test_what_a_newcomer_finds_is_not_evicted_for_the_rest_of_it() -> None:
    shelf = Shelf(4)
    shelf.keep(1, "ab")  # the oldest, and so the first to go
    shelf.keep(2, "xy")

    blocks, num_found = shelf.start(3, "abcd")

    assert num_found == 2
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (shelf.num_found("ab"), shelf.num_found("xy")) == (2, 0)


def test_what_is_found_among_the_cached_takes_room_and_what_others_hold_takes_none() -> None:
    shelf = Shelf(4)
    kept = shelf.keep(1, "ab")
    held = shelf.write(2, "xy")

    with pytest.raises(NoFreeBlocks, match="need 3 KV blocks, 2 of 4 are free"):
        shelf.start(3, "abc")
    blocks, _ = shelf.start(4, "xyzz")

    assert blocks[:2] == held
    assert shelf.num_found("ab") == 0
    assert set(blocks[2:]) == set(kept)


def test_spare_blocks_are_left_to_others() -> None:
    shelf = Shelf(4)
    shelf.keep(1, "ab")

    with pytest.raises(NoFreeBlocks, match="need 3 KV blocks, 2 of 4 are free"):
        shelf.start(2, "abc", spare=2)

    assert shelf.start(2, "abc", spare=1)[1] == 2


def test_two_that_computed_the_same_side_by_side_leave_one_behind() -> None:
    shelf = Shelf(6)
    first, _ = shelf.start(1, "ab")
    second, _ = shelf.start(2, "ab")
    for owner, blocks in ((1, first), (2, second)):
        for i, name in enumerate(shelf.names("ab")):
            assert shelf.pool.publish(owner, blocks[i], name, after=blocks[i - 1] if i else None)

    shelf.pool.free(1, first)
    one_left = shelf.pool.counts()
    shelf.pool.free(2, second)

    assert one_left == BlockCounts(total=6, free=4, cached=0, owned=2, draining=0)
    assert shelf.pool.counts() == BlockCounts(total=6, free=4, cached=2, owned=0, draining=0)
    assert shelf.prefixes.find(shelf.names("ab")) == second


def test_a_cached_twin_gives_way_to_one_in_use() -> None:
    shelf = Shelf(6)
    late, _ = shelf.start(1, "ab")
    early = shelf.keep(2, "ab")
    for i, name in enumerate(shelf.names("ab")):
        shelf.pool.publish(1, late[i], name, after=late[i - 1] if i else None)

    assert shelf.pool.counts() == BlockCounts(total=6, free=4, cached=0, owned=2, draining=0)
    assert shelf.prefixes.find(shelf.names("ab")) == late
    assert early != late


def test_after_a_clear_nothing_is_found_and_nothing_is_hung_on_what_is_gone() -> None:
    shelf = Shelf(6)
    shelf.keep(1, "xy")
    held, _ = shelf.start(2, "abc")
    first, second, _ = shelf.names("abc")
    shelf.pool.publish(2, held[0], first, after=None)

    num_freed = shelf.pool.clear()

    assert num_freed == 2
    assert (shelf.num_found("xy"), shelf.num_found("abc")) == (0, 0)
    assert not shelf.pool.publish(2, held[1], second, after=held[0])
    shelf.pool.free(2, held)
    assert shelf.pool.counts() == BlockCounts(total=6, free=6, cached=0, owned=0, draining=0)


@dataclass
class Model:
    """What a pool should do, in whole texts instead of digests and in searches instead of orders."""

    free: set[int]
    owners: dict[int, set[int]] = field(default_factory=dict)
    draining: set[int] = field(default_factory=set)  # owners
    content: dict[int, str] = field(default_factory=dict)  # the text up to the end of a block, salt first
    let_go: dict[int, int] = field(default_factory=dict)  # when a cached block lost its last owner

    def found(self, text: str, salt: str) -> int:
        ends = set(self.content.values())
        return next((i for i in range(len(text)) if salt + text[: i + 1] not in ends), len(text))

    def room_after(self, text: str, salt: str) -> int:
        """Available blocks that are left once a sequence has started; negative if it cannot."""
        held = {self.content[block] for block in self.owners if block in self.content}
        needed = sum(salt + text[: i + 1] not in held for i in range(len(text)))
        return len(self.free) + len(self.let_go) - needed

    def take(self, owner: int, blocks: list[int], num_shared: int) -> None:
        for block in blocks[:num_shared]:
            self.let_go.pop(block, None)
            self.owners.setdefault(block, set()).add(owner)
        for block in blocks[num_shared:]:
            if self.free:
                self.free.remove(block)
            else:
                assert block == self.evicted(), "another block should have gone"
                del self.let_go[block], self.content[block]
            self.owners[block] = {owner}

    def evicted(self) -> int:
        """Return the cached block that is the last of its text and was let go first."""
        ends = set(self.content.values())
        leaves = [
            block
            for block in self.let_go
            if not any(end != self.content[block] and end.startswith(self.content[block]) for end in ends)
        ]
        return min(leaves, key=lambda block: self.let_go[block])

    def publish(self, block: int, end: str) -> None:
        for twin, other in list(self.content.items()):
            if other == end and twin in self.let_go:
                del self.let_go[twin], self.content[twin]
                self.free.add(twin)
        self.content[block] = end

    def give_back(self, owner: int, blocks: list[int], now: int) -> None:
        for block in blocks:
            self.owners[block].remove(owner)
            if self.owners[block]:
                continue
            del self.owners[block]
            ends = [end for other, end in self.content.items() if other != block]
            if block in self.content and self.content[block] not in ends:
                self.let_go[block] = now
            else:
                self.content.pop(block, None)
                self.free.add(block)
        self.draining.discard(owner)

    def counts(self, num_blocks: int) -> BlockCounts:
        num_draining = sum(owners <= self.draining for owners in self.owners.values())
        return BlockCounts(
            total=num_blocks,
            free=len(self.free),
            cached=len(self.let_go),
            owned=len(self.owners) - num_draining,
            draining=num_draining,
        )


CALLS = st.one_of(
    st.tuples(st.just("start"), st.text("ab", min_size=1, max_size=6), st.sampled_from(["", "", "~"])),
    st.tuples(st.sampled_from(("publish", "publish", "publish", "drain", "free")), st.integers(0, 9)),
    st.tuples(st.sampled_from(("grow", "clear")), st.integers(0, 9)),
)


@settings(max_examples=1500, deadline=None)
@given(st.integers(1, 12), st.lists(CALLS, max_size=60))
def test_after_any_calls_the_pool_is_where_a_simple_model_is(
    num_blocks: int, calls: list[tuple[str, int] | tuple[str, str, str]]
) -> None:
    shelf = Shelf(num_blocks)
    pool, model = shelf.pool, Model(free=set(range(num_blocks)))
    held: dict[int, tuple[str, str, list[int]]] = {}  # by owner: text, salt, blocks
    num_whole: dict[int, int] = {}  # by owner: blocks that it found or published

    for now, call in enumerate(calls):
        if call[0] == "start":
            _, text, salt = call
            assert isinstance(text, str)
            has_room = model.room_after(text, salt) >= 0
            num_found = model.found(text, salt)
            try:
                blocks, num_shared = shelf.start(now, text, salt=salt)
            except NoFreeBlocks:
                assert not has_room
            else:
                assert has_room
                assert num_shared == num_found
                assert [model.content[block] for block in blocks[:num_shared]] == [
                    salt + text[: i + 1] for i in range(num_shared)
                ]
                model.take(now, blocks, num_shared)
                held[now] = (text, salt, blocks)
                num_whole[now] = num_shared
        elif call[0] == "clear":
            assert pool.clear() == len(model.let_go)
            model.free.update(model.let_go)
            model.let_go.clear()
            model.content.clear()
        elif held:
            owner = sorted(held)[call[1] % len(held)]
            text, salt, blocks = held[owner]
            i = num_whole[owner]
            is_live = owner not in model.draining
            if call[0] == "publish" and i < len(text) and is_live:
                name = shelf.names(text, salt)[i]
                can = i == 0 or blocks[i - 1] in model.content
                assert pool.publish(owner, blocks[i], name, after=blocks[i - 1] if i else None) == can
                if can:
                    model.publish(blocks[i], salt + text[: i + 1])
                    num_whole[owner] += 1
            elif call[0] == "grow" and pool.num_available and is_live:
                (block,) = pool.allocate(owner, 1).blocks
                model.take(owner, [block], 0)
                blocks.append(block)
            elif call[0] == "drain":
                pool.drain(owner, blocks)
                model.draining.add(owner)
            elif call[0] == "free":
                pool.free(owner, blocks)
                model.give_back(owner, blocks, now)
                del held[owner]

        assert pool.counts() == model.counts(num_blocks)
        assert pool.num_available == len(model.free) + len(model.let_go)
        assert {block for block in range(num_blocks) if block in shelf.prefixes} == set(model.content)
        for text, salt, _ in held.values():
            assert shelf.num_found(text, salt) == model.found(text, salt)
