"""What fits into a cache of so many bytes: tokens, conversations, and the table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.lab.memory.cache_shape import CacheSettings, CacheShape

_ENDLESS = 2**40  # tokens: a conversation whose memory has stopped growing by then never grows again


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The cache of one rank, in which all conversations lie side by side and share no prefix."""

    shape: CacheShape
    settings: CacheSettings
    cache_bytes: int

    @property
    def num_tokens(self) -> int | None:
        """Tokens of one conversation that has the cache for itself; None: of any length."""
        return self.longest(num_conversations=1)

    def conversations(self, num_tokens: int) -> int | None:
        """Return how many conversations of so many tokens fit; None: any number, as they keep nothing."""
        each = self.shape.conversation_bytes(num_tokens, self.settings)
        return self._room_bytes // each if each else None

    def longest(self, *, num_conversations: int) -> int | None:
        """Return how many tokens each of so many conversations can have; None: any number."""
        room = self._room_bytes // num_conversations
        if self.shape.conversation_bytes(_ENDLESS, self.settings) <= room:
            return None
        low, high = 0, _ENDLESS  # fits, does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.shape.conversation_bytes(middle, self.settings) <= room
            low, high = (middle, high) if fits else (low, middle)
        return low

    def table(
        self, contexts: Sequence[int], conversations: Sequence[int]
    ) -> tuple[tuple[TableCell, ...], ...]:
        """Return a row per context length and a cell per number of conversations."""
        return tuple(tuple(self._cell(context, number) for number in conversations) for context in contexts)

    def _cell(self, num_tokens: int, num_conversations: int) -> TableCell:
        needed = self.needed_bytes(num_tokens, num_conversations)
        return TableCell(
            num_tokens=num_tokens,
            num_conversations=num_conversations,
            num_bytes=needed,
            fits=needed <= self.cache_bytes,
        )

    def needed_bytes(self, num_tokens: int, num_conversations: int) -> int:
        """Return what so many conversations of so many tokens take."""
        each = self.shape.conversation_bytes(num_tokens, self.settings)
        return num_conversations * each + self.shape.scale_bytes(self.settings)

    @property
    def _room_bytes(self) -> int:
        return max(0, self.cache_bytes - self.shape.scale_bytes(self.settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """So many conversations of so many tokens."""

    num_tokens: int
    num_conversations: int
    num_bytes: int  # on each rank
    fits: bool
