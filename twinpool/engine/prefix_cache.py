"""Finds blocks by what is in them, so that equal prefixes are computed, sent and kept once.

Knows blocks as numbers; who holds one, and which one goes when room is needed, is the block pool's business.

KV depends on every token before it, so a full block is named by a digest over its tenant's salt and all
tokens up to its end, and a prefix is a chain of names.  The digest only finds; salt and tokens are then
compared block by block, so no collision shows one prompt's KV to another, and its key is drawn at each
start, so nobody can prepare one.

A block can be found only together with the blocks before it: they are forgotten after it.

Source:
    Chained block hashes and salts: automatic prefix caching in vLLM.  Leaves before their parents:
    RadixAttention in SGLang (Zheng et al., NeurIPS 2024).
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import KeysView, Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockName:
    """What a full block holds, and after what."""

    digest: bytes  # over the salt and all tokens up to the end of the block
    salt: str
    tokens: bytes  # the ids of this block, 4 bytes each


class PrefixCache:
    """A table from names to the blocks that hold what they say.

    Args:
        block_tokens: Tokens of a full block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._secret = secrets.token_bytes(32)
        self._entries: dict[bytes, _Entry] = {}  # by digest
        self._by_block: dict[int, _Entry] = {}

    def extend(self, names: list[BlockName], token_ids: Sequence[int], *, salt: str) -> None:
        """Append the names of the full blocks of ``token_ids`` that ``names`` does not have yet."""
        start, num_full = len(names), len(token_ids) // self._block_tokens
        ids = array("I", token_ids[start * self._block_tokens : num_full * self._block_tokens])
        packed, size = ids.tobytes(), self._block_tokens * ids.itemsize
        digest = names[-1].digest if names else bytes(DIGEST_BYTES)
        end = salt.encode()
        for offset in range(0, len(packed), size):
            tokens = packed[offset : offset + size]
            digest = blake2b(digest + tokens + end, key=self._secret, digest_size=DIGEST_BYTES).digest()
            names.append(BlockName(digest, salt, tokens))

    @property
    def blocks(self) -> KeysView[int]:
        """All blocks that can be found."""
        return self._by_block.keys()

    def block_of(self, name: BlockName) -> int | None:
        """Return a block found under a digest alone: a hint, whose content is not compared."""
        entry = self._entries.get(name.digest)
        return None if entry is None else entry.blocks[0]

    def find(self, prefix: Sequence[BlockName]) -> list[int]:
        """Return the blocks of the longest part of ``prefix`` that can be found, in its order."""
        blocks: list[int] = []
        parent: _Entry | None = None
        for name in prefix:
            entry = self._entries.get(name.digest)
            if entry is None or not entry.fits(name, parent):
                break
            blocks.append(entry.blocks[0])
            parent = entry
        return blocks

    def add(self, block: int, name: BlockName, *, after: int | None) -> bool:
        """Let ``block`` be found from now on; return whether it can be.

        Args:
            block: Holds what ``name`` says, whole.
            name: Of its content.
            after: The block before it in the same sequence; None for the first.

        Returns:
            False if the block before it cannot be found (any more), or the digest is that of something else.
        """
        assert block not in self._by_block, f"block {block} can be found already"
        parent = None if after is None else self._by_block.get(after)
        if after is not None and parent is None:
            return False
        entry = self._entries.get(name.digest)
        if entry is None:
            entry = self._entries[name.digest] = _Entry(name, parent)
            if parent is not None:
                parent.num_children += 1
        elif not entry.fits(name, parent):
            return False
        entry.blocks.append(block)
        self._by_block[block] = entry
        return True

    def twins(self, block: int) -> list[int]:
        """Return the other blocks of the same content: sequences that ran side by side computed it twice."""
        return [other for other in self._by_block[block].blocks if other != block]

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def remove(self, block: int) -> None:
        """Let ``block`` not be found any more; those that follow it went before."""
        entry = self._by_block.pop(block)
        entry.blocks.remove(block)
        if entry.blocks:
            return
        assert entry.num_children == 0, f"block {block} is forgotten before those that follow it"
        del self._entries[entry.name.digest]
        if entry.parent is not None:
            entry.parent.num_children -= 1

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._by_block.clear()


class _Entry:
    """One content and the blocks that hold it: one, or several while each is in somebody's hands."""

    __slots__ = ("blocks", "name", "num_children", "parent")

    def __init__(self, name: BlockName, parent: _Entry | None) -> None:
        self.name = name
        self.parent = parent
        self.blocks: list[int] = []
        self.num_children = 0

    def fits(self, name: BlockName, parent: _Entry | None) -> bool:
        return self.parent is parent and self.name == name
