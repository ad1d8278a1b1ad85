"""A KV store of bytes in numpy, independent of the engine's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinpool.core.layout import KVLayout


class NumpyStore:
    """``bytes``: ``[num_layers, 2, num_blocks, block_tokens, bytes of one key or value]``, uint8."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.bytes = np.zeros(
            (layout.num_layers, 2, num_blocks, layout.block_tokens, layout.layer_token_bytes // 2), np.uint8
        )
        self.num_reads = 0

    def fill(self, seed: int) -> NumpyStore:
        """Set every byte at random."""
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape, np.uint8)
        return self

    def sequence(self, blocks: Sequence[int], *, first_token: int = 0, num_tokens: int) -> np.ndarray:
        """Return tokens ``[first_token, num_tokens)`` of all layers: ``[num_layers, 2, tokens, bytes]``."""
        slots = self._slots(blocks, first_token, num_tokens - first_token)
        return self._flat()[:, :, slots].copy()

    def read(self, *, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int) -> memoryview:
        self.num_reads += 1
        part = self._flat()[layer][:, self._slots(blocks, first_token, num_tokens)]
        return memoryview(np.ascontiguousarray(part)).cast("B")

    def write(
        self, payload: memoryview, *, layer: int, blocks: Sequence[int], first_token: int, num_tokens: int
    ) -> None:
        part = np.frombuffer(payload, np.uint8).reshape(2, num_tokens, -1)
        self._flat()[layer][:, self._slots(blocks, first_token, num_tokens)] = part

    def _flat(self) -> np.ndarray:
        layers, sides, blocks, tokens, width = self.bytes.shape
        return self.bytes.reshape(layers, sides, blocks * tokens, width)

    def _slots(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> np.ndarray:
        tokens = np.arange(first_token, first_token + num_tokens)
        size = self.layout.block_tokens
        return np.asarray(blocks)[tokens // size] * size + tokens % size
