"""A KV store of bytes in numpy, independent of the engine's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinpool.core.layout import KVLayout
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVPayload, KVRange


class NumpyStore:
    """``bytes``: ``[num_layers, 2, num_blocks, block_tokens, heads of this rank, bytes of one head]``, uint8.

    Knows the layout's own dtype as wire format, and no other.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, *, rank: int = 0) -> None:
        self.layout = layout
        self.heads = layout.rank_heads(rank)
        width = layout.layer_token_bytes // (2 * layout.num_kv_heads)
        self.bytes = np.zeros(
            (layout.num_layers, 2, num_blocks, layout.block_tokens, len(self.heads), width), np.uint8
        )
        self.num_reads = 0

    def fill(self, seed: int) -> NumpyStore:
        """Set every byte at random."""
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape, np.uint8)
        return self

    def sequence(self, blocks: Sequence[int], *, first_token: int = 0, num_tokens: int) -> np.ndarray:
        """Return tokens ``[first_token, num_tokens)``: ``[layers, 2, tokens, heads, bytes]``."""
        slots = self._slots(blocks, first_token, num_tokens - first_token)
        return self._flat()[:, :, slots].copy()

    def payload(self, part: KVRange, *, wire: str, on_device: bool = False) -> HostPayload:
        assert wire == self.layout.dtype
        self.num_reads += 1
        slots = self._slots(part.blocks, part.first_token, part.num_tokens)
        data = self._flat()[part.layer][:, slots][:, :, self._own(part.heads)]
        return HostPayload([memoryview(np.ascontiguousarray(data)).cast("B")])

    def write(self, payload: KVPayload, part: KVRange, *, wire: str) -> None:
        assert wire == self.layout.dtype
        data = np.frombuffer(b"".join(payload.views()), np.uint8)
        slots = self._slots(part.blocks, part.first_token, part.num_tokens)
        heads = self._own(part.heads)
        self._flat()[part.layer][:, slots, heads] = data.reshape(2, part.num_tokens, len(part.heads), -1)

    def _own(self, heads: range) -> slice:
        return slice(heads.start - self.heads.start, heads.stop - self.heads.start)

    def _flat(self) -> np.ndarray:
        layers, sides, blocks, tokens, heads, width = self.bytes.shape
        return self.bytes.reshape(layers, sides, blocks * tokens, heads, width)

    def _slots(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> np.ndarray:
        tokens = np.arange(first_token, first_token + num_tokens)
        size = self.layout.block_tokens
        return np.asarray(blocks)[tokens // size] * size + tokens % size
