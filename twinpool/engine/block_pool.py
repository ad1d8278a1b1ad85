"""Which block of a KV cache belongs to whom: numbers only.

Knows nothing of what is stored in a block, nor why somebody wants one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from twinpool.core.errors import NoFreeBlocks
from twinpool.core.ports import BlockCounts

FREE = -1


class BlockPool:
    """Block numbers ``0 .. num_blocks - 1``; each is free or has exactly one owner.

    An owner is any number from 0 on.  Freeing a block that is free, or somebody else's, is a bug of
    the caller and an assertion here: the next owner would share the block without knowing.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, "a pool needs a block"
        self._owners = [FREE] * num_blocks
        self._free = deque(range(num_blocks))
        self._draining: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, owner: int, num_blocks: int) -> list[int]:
        """Give ``num_blocks`` free blocks to ``owner``: all of them or none.

        Raises:
            NoFreeBlocks: Nothing was taken.
        """
        assert owner >= 0, "an owner is a number from 0 on"
        if num_blocks > len(self._free):
            raise NoFreeBlocks(needed=num_blocks, free=len(self._free), total=len(self._owners))
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            assert self._owners[block] == FREE, f"block {block} is free and owned"
            self._owners[block] = owner
        return blocks

    def drain(self, owner: int, blocks: Sequence[int]) -> None:
        """Mark blocks whose owner's request is over while a transfer may still touch them."""
        self._check_owner(owner, blocks)
        self._draining.update(blocks)

    def free(self, owner: int, blocks: Sequence[int]) -> None:
        """Take ``blocks`` back from ``owner``."""
        self._check_owner(owner, blocks)
        assert len(set(blocks)) == len(blocks), "a block is freed twice"
        for block in blocks:
            self._owners[block] = FREE
        self._draining.difference_update(blocks)
        self._free.extend(blocks)

    def counts(self) -> BlockCounts:
        """Return where the blocks are, counted anew from the table of owners."""
        num_owned = sum(1 for owner in self._owners if owner != FREE) - len(self._draining)
        return BlockCounts(
            total=len(self._owners),
            free=len(self._free),
            cached=0,
            owned=num_owned,
            draining=len(self._draining),
        )

    def _check_owner(self, owner: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._owners[block] == owner, f"block {block} is not owned by {owner}"
