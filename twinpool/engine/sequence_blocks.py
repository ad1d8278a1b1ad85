"""The blocks of sequences: given at a start, one by one as they grow, and taken back; and which are shared.

Two rules for the KV that sequences share:

- A block can be found once a step has ended well that completed it, or a transfer of which all is there.
- A sequence finds what it can at the moment it gets its blocks, and writes only behind that.

Knows no queue, no policy and no time; the scheduler says who gets blocks and who gives them up.
"""

from __future__ import annotations

from collections import Counter

from twinpool.engine.block_pool import BlockPool
from twinpool.engine.config import EngineConfig
from twinpool.engine.prefix_cache import BlockName, PrefixCache
from twinpool.engine.sequence import SequenceState, SequenceStatus


class SequenceBlocks:
    """Moves blocks between a pool and sequences.

    Args:
        config: Size of a block, and whether prefixes are shared.
        num_blocks: Of the pool.
        counters: Gets totals of what was looked for, found and evicted.

    Attributes:
        pool: Read it; it is changed here alone.
    """

    def __init__(self, config: EngineConfig, *, num_blocks: int, counters: Counter[str]) -> None:
        self._config = config
        self._counters = counters
        self._prefixes = PrefixCache(config.block_tokens)
        self.pool = BlockPool(num_blocks, self._prefixes)

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self._config.block_tokens)

    def needs_block(self, sequence: SequenceState) -> bool:
        """Whether the next token of a decoding sequence needs a block of its own."""
        return len(sequence.blocks) * self._config.block_tokens < len(sequence.token_ids)

    def take(self, sequence: SequenceState, *, spare: int) -> None:
        """Give a starting sequence all its blocks; what it finds of its prefix is its own from here on.

        Args:
            sequence: WAITING or RECEIVING.
            spare: So many available blocks are for others.

        Raises:
            NoFreeBlocks: Nothing was taken.
        """
        prefix = self._prefix(sequence)
        num_blocks = self.num_blocks(sequence.num_start_tokens)
        got = self.pool.allocate(sequence.number, num_blocks, prefix=prefix, spare=spare)
        num_cached = got.num_shared * self._config.block_tokens
        sequence.blocks = got.blocks
        sequence.num_published_blocks = got.num_shared
        if sequence.num_preemptions == 0:  # later it may find what it computed itself
            sequence.num_cached_tokens = num_cached
        if sequence.status is SequenceStatus.WAITING:
            sequence.num_computed_tokens = num_cached
        if prefix:
            self._counters["prefix_query_tokens"] += len(sequence.token_ids)
            self._counters["prefix_hit_tokens"] += num_cached
        self._counters["evicted_blocks"] = self.pool.num_evicted

    def grow(self, *sequences: SequenceState) -> None:
        """Give each decoding sequence, in turn, one more block; there must be so many."""
        blocks = self.pool.take_each([sequence.number for sequence in sequences])
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.blocks.append(block)
        self._counters["evicted_blocks"] = self.pool.num_evicted

    def publish(self, sequence: SequenceState) -> None:
        """Let others find the full blocks whose KV is whole now."""
        if not self._config.prefix_cache:
            return
        num_whole = sequence.num_computed_tokens // self._config.block_tokens
        if num_whole == sequence.num_published_blocks:
            return
        self._name_blocks(sequence)
        while sequence.num_published_blocks < num_whole:
            index = sequence.num_published_blocks
            after = sequence.blocks[index - 1] if index else None
            name = sequence.block_names[index]
            if not self.pool.publish(sequence.number, sequence.blocks[index], name, after=after):
                return
            sequence.num_published_blocks += 1

    def drain(self, sequence: SequenceState) -> None:
        """Mark the blocks of a sequence that is over while a transfer may still touch them."""
        self.pool.drain(sequence.number, sequence.blocks)

    def release(self, sequence: SequenceState) -> None:
        """Take all blocks of a sequence back."""
        self.pool.free(sequence.number, sequence.blocks)
        sequence.blocks = []
        sequence.num_published_blocks = 0

    def _prefix(self, sequence: SequenceState) -> list[BlockName]:
        """Return the names of the blocks that a sequence may find instead of having them written."""
        if not self._config.prefix_cache:
            return []
        self._name_blocks(sequence)
        if sequence.status is SequenceStatus.RECEIVING:
            return sequence.block_names
        if sequence.wants_prompt_logprobs:
            return []
        # The last known token is always computed: the next one is chosen from its logits.
        return sequence.block_names[: (len(sequence.token_ids) - 1) // self._config.block_tokens]

    def _name_blocks(self, sequence: SequenceState) -> None:
        self._prefixes.extend(sequence.block_names, sequence.token_ids, salt=sequence.request.cache_salt)
