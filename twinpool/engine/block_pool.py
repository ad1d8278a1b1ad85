"""Which block of a KV cache belongs to whom: numbers only.

What is stored in a block is the prefix cache's business, why somebody wants one the scheduler's.

    free --allocate--> owned --free, content findable--> cached --allocate with its prefix--> owned
      ^                  |                                 |
      |                  `- drain: draining until free     `- allocate without: evicted
      `------ free, content not findable
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from twinpool.core.errors import NoFreeBlocks
from twinpool.core.ports import BlockCounts
from twinpool.engine.prefix_cache import BlockName, PrefixCache


class Allocation(NamedTuple):
    """Blocks in the order of a sequence's tokens."""

    blocks: list[int]
    num_shared: int  # the first ones: they hold what the prefix says, and must not be written


class BlockPool:
    """Block numbers ``0 .. num_blocks - 1``; each is free, cached, or held by its owners.

    An owner is any number from 0 on.  A block has several only if its content was published and found
    again.  Freeing a block that is free, or somebody else's, is a bug of the caller and an assertion here:
    the next owner would share the block without knowing.

    A cached block has no owner and keeps its content until somebody needs the room.  Those that were let
    go first are evicted first.  Whoever holds a block holds those before it in the prefix too, and lets
    go of the last one first, so the first in line is never needed to reach another one.

    Attributes:
        num_evicted: Cached blocks whose content was given up for room, since the start.
    """

    def __init__(self, num_blocks: int, prefixes: PrefixCache) -> None:
        assert num_blocks >= 1, "a pool needs a block"
        self.num_evicted = 0
        self._num_blocks = num_blocks
        self._prefixes = prefixes
        self._free = list(range(num_blocks - 1, -1, -1))  # the next to be taken last: what was free shortest
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._private: dict[int, set[int]] = {}  # by owner: blocks that nobody else ever had a way to
        self._owners: dict[int, set[int]] = {}  # by block: of those that were published and are held
        self._draining: set[tuple[int, int]] = set()  # (block, owner)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that a newcomer can get: free and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(
        self, owner: int, num_blocks: int, *, prefix: Sequence[BlockName] = (), spare: int = 0
    ) -> Allocation:
        """Give ``owner`` blocks: those of its prefix that are here, then empty ones; all of them or none.

        Args:
            owner: Holds none of them yet.
            num_blocks: Of both kinds together.
            prefix: Names of its first blocks.
            spare: So many available blocks are for others.

        Raises:
            NoFreeBlocks: Nothing was taken.
        """
        assert owner >= 0, "an owner is a number from 0 on"
        assert len(prefix) <= num_blocks, "a prefix is longer than its sequence"
        room = max(0, self.num_available - spare)
        if not prefix:
            self._check_room(num_blocks, room)
            return Allocation(self._take_empty(owner, num_blocks), 0)
        self._check_room(num_blocks - self._num_held(prefix), room)
        shared = self._prefixes.find(prefix)
        self._check_room(num_blocks - sum(block in self._owners for block in shared), room)
        for block in shared:  # before anything is evicted, which could be one of these
            self._cached.pop(block, None)
            owners = self._owners.setdefault(block, set())
            assert owner not in owners, f"block {block} is owned by {owner} already"
            owners.add(owner)
        return Allocation(shared + self._take_empty(owner, num_blocks - len(shared)), len(shared))

    def take_each(self, owners: Sequence[int]) -> list[int]:
        """Give each of ``owners``, in turn, one more block, an empty one; there must be so many."""
        blocks = self._empty(len(owners))
        private = self._private
        for owner, block in zip(owners, blocks, strict=True):
            if owner in private:
                private[owner].add(block)
            else:
                private[owner] = {block}
        return blocks

    def publish(self, owner: int, block: int, name: BlockName, *, after: int | None) -> bool:
        """Let others find a block whose content is whole; return whether they can.

        Args:
            owner: Of both blocks.
            block: Holds what ``name`` says; nobody writes it any more.
            name: Of its content.
            after: The block before it; None for the first of a sequence.
        """
        self._check_owner(owner, [block] if after is None else [after, block])
        if not self._prefixes.add(block, name, after=after):
            return False
        self._private[owner].remove(block)
        self._owners[block] = {owner}
        for twin in self._prefixes.twins(block):
            if twin in self._cached:  # one is enough, and this one is in use
                del self._cached[twin]
                self._prefixes.remove(twin)
                self._free.append(twin)
        return True

    def drain(self, owner: int, blocks: Sequence[int]) -> None:
        """Mark blocks whose owner's request is over while a transfer may still touch them."""
        self._check_owner(owner, blocks)
        self._draining.update((block, owner) for block in blocks)

    def free(self, owner: int, blocks: Sequence[int]) -> None:
        """Take ``blocks``, in the order of their tokens, back from ``owner``."""
        names = set(blocks)
        assert len(names) == len(blocks), "a block is freed twice"
        if self._draining:
            self._draining.difference_update((block, owner) for block in blocks)
        private = self._private.get(owner, set())
        if private == names:  # nobody else knows any of them
            self._private.pop(owner, None)
            self._free.extend(reversed(blocks))
            return
        self._check_owner(owner, blocks)
        for block in reversed(blocks):
            if block in private:
                private.remove(block)
                self._free.append(block)
                continue
            owners = self._owners[block]
            owners.remove(owner)
            if not owners:
                del self._owners[block]
                self._let_go(block)
        if not private:
            self._private.pop(owner, None)

    def clear(self) -> int:
        """Forget every content; return how many cached blocks became free.  Owners keep what they hold."""
        num_cached = len(self._cached)
        self._prefixes.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        return num_cached

    def counts(self) -> BlockCounts:
        """Return where the blocks are, each place counted by itself."""
        draining = {block for block, _ in self._draining}
        num_draining = sum(
            all((block, owner) in self._draining for owner in self._owners.get(block, ()))
            for block in draining
        )
        return BlockCounts(
            total=self._num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            owned=len(self._owners) + sum(map(len, self._private.values())) - num_draining,
            draining=num_draining,
        )

    def _num_held(self, prefix: Sequence[BlockName]) -> int:
        """Count the blocks of a prefix that somebody holds: to share them takes no room.

        Whoever holds a block holds those before it, so halving finds the last one; a line of long prompts
        that wait for room is looked at in every step.
        """
        return bisect_left(prefix, True, key=lambda name: self._prefixes.block_of(name) not in self._owners)

    def _check_room(self, needed: int, room: int) -> None:
        if needed > room:
            raise NoFreeBlocks(needed=needed, free=room, total=self._num_blocks)

    def _take_empty(self, owner: int, num_blocks: int) -> list[int]:
        """Give ``owner`` so many blocks that hold nothing; there is room."""
        blocks = self._empty(num_blocks)
        if owner in self._private:
            self._private[owner].update(blocks)
        else:
            self._private[owner] = set(blocks)
        return blocks

    def _empty(self, num_blocks: int) -> list[int]:
        """Take so many blocks that hold nothing out of the pool, free ones first; there is room."""
        num_free = min(num_blocks, len(self._free))
        blocks = self._free[: -num_free - 1 : -1]
        del self._free[len(self._free) - num_free :]
        for _ in range(num_blocks - num_free):
            block, _ = self._cached.popitem(last=False)
            self._prefixes.remove(block)
            self.num_evicted += 1
            blocks.append(block)
        findable = self._prefixes.blocks
        assert not findable or findable.isdisjoint(blocks), "a block is not empty"
        assert not self._owners or self._owners.keys().isdisjoint(blocks), "a block is not free"
        return blocks

    def _let_go(self, block: int) -> None:
        """Keep the content of a block that nobody holds any more, if it is found there and nowhere else."""
        if block in self._prefixes and not self._prefixes.twins(block):
            self._cached[block] = None
            return
        if block in self._prefixes:
            self._prefixes.remove(block)
        self._free.append(block)

    def _check_owner(self, owner: int, blocks: Sequence[int]) -> None:
        private = self._private.get(owner, ())
        for block in blocks:
            is_owned = block in private or owner in self._owners.get(block, ())
            assert is_owned, f"block {block} is not owned by {owner}"
