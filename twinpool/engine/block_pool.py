"""Which block of a KV cache belongs to whom: numbers only.

What is stored in a block is the prefix cache's business, why somebody wants one the scheduler's.

    free --allocate--> owned --free, content findable--> cached --allocate with its prefix--> owned
      ^                  |                                 |
      |                  `- drain: draining until free     `- allocate without: evicted
      `------ free, content not findable
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

from twinpool.core.errors import NoFreeBlocks
from twinpool.core.ports import BlockCounts
from twinpool.engine.prefix_cache import BlockName, PrefixCache


@dataclass(frozen=True, slots=True)
class Allocation:
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
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._sole: dict[int, int] = {}  # the owner of a block that has one, as nearly all have
        self._shared: dict[int, set[int]] = {}  # the owners of one that has several
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
        self._check_room(num_blocks - sum(map(self._is_held, shared)), room)
        for block in shared:  # before anything is evicted, which could be one of these
            self._share(owner, block)
        return Allocation(shared + self._take_empty(owner, num_blocks - len(shared)), len(shared))

    def take_each(self, owners: Sequence[int]) -> list[int]:
        """Give each of ``owners``, in turn, one more block, an empty one; there must be so many."""
        blocks = self._empty(len(owners))
        self._sole.update(zip(blocks, owners, strict=True))
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
        self._check_owner(owner, blocks)
        assert len(set(blocks)) == len(blocks), "a block is freed twice"
        if self._draining:
            self._draining.difference_update((block, owner) for block in blocks)
        if self._is_plain(blocks):
            for block in blocks:
                del self._sole[block]
            self._free.extend(reversed(blocks))
            return
        for block in reversed(blocks):
            if block in self._shared:
                self._leave(owner, block)
            else:
                del self._sole[block]
                self._let_go(block)

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
            all((block, owner) in self._draining for owner in self._owners(block)) for block in draining
        )
        return BlockCounts(
            total=self._num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            owned=len(self._sole) + len(self._shared) - num_draining,
            draining=num_draining,
        )

    def _num_held(self, prefix: Sequence[BlockName]) -> int:
        """Count the blocks of a prefix that somebody holds: to share them takes no room.

        Whoever holds a block holds those before it, so halving finds the last one; a line of long prompts
        that wait for room is looked at in every step.
        """
        return bisect_left(prefix, True, key=lambda name: not self._is_held(self._prefixes.block_of(name)))

    def _is_held(self, block: int | None) -> bool:
        return block in self._sole or block in self._shared

    def _is_plain(self, blocks: Sequence[int]) -> bool:
        """Whether none of ``blocks`` has several owners or can be found."""
        return self._shared.keys().isdisjoint(blocks) and self._prefixes.blocks.isdisjoint(blocks)

    def _owners(self, block: int) -> Set[int]:
        return {self._sole[block]} if block in self._sole else self._shared.get(block, frozenset())

    def _check_room(self, needed: int, room: int) -> None:
        if needed > room:
            raise NoFreeBlocks(needed=needed, free=room, total=self._num_blocks)

    def _share(self, owner: int, block: int) -> None:
        """Make ``owner`` one more owner of a block that holds what it looks for."""
        owners = {*self._owners(block)}
        assert owner not in owners, f"block {block} is owned by {owner} already"
        if not owners:
            self._cached.pop(block, None)
            self._sole[block] = owner
            return
        self._sole.pop(block, None)
        self._shared[block] = owners | {owner}

    def _leave(self, owner: int, block: int) -> None:
        """Let ``owner`` leave a block to the others."""
        owners = self._shared[block]
        owners.remove(owner)
        if len(owners) == 1:
            del self._shared[block]
            self._sole[block] = owners.pop()

    def _take_empty(self, owner: int, num_blocks: int) -> list[int]:
        """Give ``owner`` so many blocks that hold nothing; there is room."""
        blocks = self._empty(num_blocks)
        self._sole.update(dict.fromkeys(blocks, owner))
        return blocks

    def _empty(self, num_blocks: int) -> list[int]:
        """Take so many blocks that hold nothing out of the pool, free ones first; there is room."""
        free = self._free
        blocks = [free.popleft() for _ in range(min(num_blocks, len(free)))]
        for _ in range(num_blocks - len(blocks)):
            block, _ = self._cached.popitem(last=False)
            self._prefixes.remove(block)
            self.num_evicted += 1
            blocks.append(block)
        assert self._is_plain(blocks) and self._sole.keys().isdisjoint(blocks), "a block is not empty"
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
        if list(map(self._sole.get, blocks)).count(owner) == len(blocks):
            return
        for block in blocks:
            is_owned = self._sole.get(block) == owner or owner in self._shared.get(block, ())
            assert is_owned, f"block {block} is not owned by {owner}"
